"""Stands between a program and the operating system: every change below a folder is a point at which it may be struck.

    hook(folder, decide)

`decide` is asked before each change and answers with what shall happen: nothing (None), a death of the process before
or after it, half of a write and then the death, a power cut (death, and all that was not synced is gone), or an error
number that is raised. Only for processes that end afterwards: nothing is put back.

The changes are open for writing, write, truncate, fsync, rename, replace, symlink, link, unlink, rmdir and mkdir by
way of `os`, `open` and `pathlib`, and the files that safetensors writes by itself.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

DIED = 137
"""Exit code of a process that was struck."""

BEFORE, AFTER, TORN, POWER_CUT = "before", "after", "torn", "power cut"

WRITES = frozenset({"write", "write file"})
"""Operations that can leave half of their bytes."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Operation:
    """A change that is about to be made; `path` is relative to the folder."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


Decide = Callable[[Operation], str | int | None]
"""What shall happen: one of the four words, an error number, or None."""


def hook(folder: Path, decide: Decide) -> None:
    """Ask `decide` about every change below `folder` from now on, in this process."""
    _Hooks(folder.resolve(), decide).install()


class _Unsynced:
    """What a power cut takes away: bytes of files, and entries of folders, that no fsync has covered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: set[Path] = set()
        self._synced: dict[Path, int] = {}
        self._entries: list[tuple[str, Path, Path | str | None]] = []

    def opened(self, path: Path, *, is_emptied: bool) -> None:
        """Bytes that were there before this process are on the disk."""
        self._synced.setdefault(path, path.stat().st_size)
        if is_emptied:
            self._synced[path] = 0
            self._files.add(path)

    def wrote(self, path: Path) -> None:
        self._files.add(path)

    def made(self, path: Path) -> None:
        if path != self._folder:
            self._entries.append(("made", path, None))

    def moved(self, source: Path, place: Path, replaced_link: str | None) -> None:
        self._files = {_moved(path, source, place) for path in self._files}
        self._synced = {_moved(path, source, place): size for path, size in self._synced.items()}
        self._entries = [
            (kind, _moved(path, source, place), other)
            for kind, path, other in self._entries
            if kind != "made" or path != source  # the name that it had is gone in any case
        ]
        self._entries.append(("moved", place, replaced_link if replaced_link is not None else source))

    def removed(self, path: Path) -> None:
        self._files.discard(path)
        self._synced.pop(path, None)
        self._entries = [entry for entry in self._entries if entry[1] != path]

    def synced(self, path: Path) -> None:
        self._files.discard(path)
        with contextlib.suppress(OSError):
            self._synced[path] = path.stat().st_size
        self._entries = [entry for entry in self._entries if entry[1].parent != path]

    def lose(self) -> None:
        for path in self._files:
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                safe = min(self._synced.get(path, 0), size)
                os.truncate(path, safe + (size - safe) // 2)
        while self._entries:
            kind, path, other = self._entries.pop()
            with contextlib.suppress(OSError):
                if kind == "moved" and isinstance(other, Path):
                    if not os.path.lexists(other):
                        os.rename(path, other)
                        self._entries = [(kind, _moved(entry, path, other), old) for kind, entry, old in self._entries]
                    continue
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                if isinstance(other, str):
                    os.symlink(other, path)


def _moved(path: Path, source: Path, place: Path) -> Path:
    return place / path.relative_to(source) if path.is_relative_to(source) else path


class _Hooks:
    def __init__(self, folder: Path, decide: Decide) -> None:
        self.folder, self.decide = folder, decide
        self.unsynced = _Unsynced(folder)
        self.real = {name: getattr(os, name) for name in dir(os)}

    def install(self) -> None:
        """Replace the functions."""
        os.open = self._os_open  # type: ignore[assignment]
        builtins.open = io.open = self._open  # type: ignore[assignment]
        for name in ("write", "pwrite", "writev"):
            self._wrap_descriptor(name, self.unsynced.wrote)
        for name in ("ftruncate", "posix_fallocate"):
            self._wrap_descriptor(name, self.unsynced.wrote)
        for name in ("fsync", "fdatasync"):
            self._wrap_descriptor(name, self.unsynced.synced)
        for name in ("unlink", "remove", "rmdir"):
            self._wrap_path(name, self.unsynced.removed)
        self._wrap_path("mkdir", self.unsynced.made)
        self._wrap_path("truncate", self.unsynced.wrote)
        for name in ("rename", "replace"):
            self._wrap_move(name)
        for name in ("symlink", "link"):
            self._wrap_link(name)
        self._wrap_safetensors()

    def strike(
        self,
        name: str,
        path: Path | None,
        call: Callable[[], Any],
        done: Callable[[], None],
        half: Callable[[], None] | None = None,
    ) -> Any:
        """Do `call`, unless it was decided otherwise."""
        if path is None:
            return call()
        fate = self.decide(Operation(name, str(path.relative_to(self.folder))))
        if fate is None:
            result = call()
            done()
            return result
        if isinstance(fate, int):
            if half is not None:
                half()
            raise OSError(fate, os.strerror(fate), str(path))
        if fate == TORN and half is not None:
            half()
        elif fate in (AFTER, POWER_CUT):
            call()
            done()
            if fate == POWER_CUT:
                self._cut()
        self._die()

    def _cut(self) -> None:
        for name in ("open", "unlink", "rmdir", "rename", "symlink", "truncate"):
            setattr(os, name, self.real[name])
        self.unsynced.lose()

    def _die(self) -> NoReturn:
        os._exit(DIED)

    def _below(self, path: Any, dir_fd: int | None = None) -> Path | None:
        """The path, if it is below the folder; links of the path itself are not followed."""
        if isinstance(path, int):
            return self._of_descriptor(path)
        text = os.fsdecode(os.fspath(path))
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        full = Path(os.path.realpath(os.path.dirname(os.path.abspath(text)))) / os.path.basename(text)
        return full if full.is_relative_to(self.folder) else None

    def _of_descriptor(self, descriptor: int) -> Path | None:
        try:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            return None
        return path if path.is_relative_to(self.folder) else None

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def call() -> int:
            return int(self.real["open"](path, flags, mode, dir_fd=dir_fd))

        place = self._below(path, dir_fd) if flags & _WRITING else None
        return int(self.strike("open", place, call, self._opened(place, bool(flags & os.O_TRUNC))))

    def _opened(self, place: Path | None, is_emptied: bool) -> Callable[[], None]:
        if place is None:
            return lambda: None
        if os.path.lexists(place):
            return lambda: self.unsynced.opened(place, is_emptied=is_emptied)

        def done() -> None:
            self.unsynced.made(place)
            self.unsynced.wrote(place)

        return done

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        place = self._below(file) if set(mode) & set("wax+") else None
        if isinstance(file, int):  # opened by os.open
            inner = _OPEN(file, mode, *args, **kwargs)
        else:
            call = lambda: _OPEN(file, mode, *args, **kwargs)  # noqa: E731
            inner = self.strike("open", place, call, self._opened(place, "w" in mode))
        return inner if place is None else _File(inner, self, place)

    def _wrap_descriptor(self, name: str, done: Callable[[Path], None]) -> None:
        real = self.real[name]

        def wrapped(descriptor: Any, *args: Any, **kwargs: Any) -> Any:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            path = self._of_descriptor(number)
            half = (lambda: real(number, _half(args[0]))) if name == "write" else None
            call = lambda: real(number, *args, **kwargs)  # noqa: E731
            return self.strike(name, path, call, lambda: done(path) if path else None, half)

        setattr(os, name, wrapped)

    def _wrap_path(self, name: str, done: Callable[[Path], None]) -> None:
        real = self.real[name]

        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            place = self._below(path, kwargs.get("dir_fd"))
            call = lambda: real(path, *args, **kwargs)  # noqa: E731
            fails = place is not None and os.path.lexists(place) is (name == "mkdir")
            return call() if fails else self.strike(name, place, call, lambda: done(place) if place else None)

        setattr(os, name, wrapped)

    def _wrap_move(self, name: str) -> None:
        real = self.real[name]

        def wrapped(source: Any, place: Any, **kwargs: Any) -> None:
            old, new = self._below(source, kwargs.get("src_dir_fd")), self._below(place, kwargs.get("dst_dir_fd"))
            replaced = os.readlink(new) if new is not None and new.is_symlink() else None
            self.strike(
                name,
                new,
                lambda: real(source, place, **kwargs),
                lambda: self.unsynced.moved(old, new, replaced) if old and new else None,
            )

        setattr(os, name, wrapped)

    def _wrap_link(self, name: str) -> None:
        real = self.real[name]

        def wrapped(source: Any, place: Any, *args: Any, **kwargs: Any) -> None:
            new = self._below(place, kwargs.get("dir_fd"))
            call = lambda: real(source, place, *args, **kwargs)  # noqa: E731
            self.strike(name, new, call, lambda: self.unsynced.made(new) if new else None)

        setattr(os, name, wrapped)

    def _wrap_safetensors(self) -> None:
        module = sys.modules.get("safetensors.torch")
        if module is None:  # a program without torch
            return
        real = module.serialize_file

        def wrapped(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            place = self._below(filename)

            def call() -> None:
                real(tensors, filename, *args, **kwargs)

            def half() -> None:
                call()
                self.real["truncate"](filename, os.stat(filename).st_size // 2)

            self.strike("write file", place, call, self._opened(place, True), half)

        module.serialize_file = wrapped  # type: ignore[attr-defined]


class _File:
    """A file open for writing: each write goes to the operating system at once, and is a point."""

    def __init__(self, inner: Any, hooks: _Hooks, path: Path) -> None:
        self._inner, self._hooks, self._path = inner, hooks, path

    def write(self, data: Any) -> int:
        def call(part: Any = data) -> int:
            count = self._inner.write(part)
            self._inner.flush()
            return int(count)

        def done() -> None:
            self._hooks.unsynced.wrote(self._path)

        return int(self._hooks.strike("write", self._path, call, done, lambda: None if call(_half(data)) else None))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def truncate(self, size: int | None = None) -> int:
        call = lambda: self._inner.truncate(size)  # noqa: E731
        return int(self._hooks.strike("truncate", self._path, call, lambda: self._hooks.unsynced.wrote(self._path)))

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exc: object) -> None:
        self._inner.close()

    def __iter__(self) -> Any:
        return iter(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _half(data: Any) -> Any:
    if isinstance(data, str):
        return data[: len(data) // 2]
    view = memoryview(data).cast("B")
    return view[: len(view) // 2]


_OPEN = builtins.open
