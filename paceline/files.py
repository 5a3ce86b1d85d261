"""Files and folders that appear whole or not at all, also when the process is killed or the disk is full.

Besides: where this user's cache is.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PARTIAL, _REPLACED = ".partial-", ".replaced"


def default_cache_dir() -> Path:
    """``$PACELINE_CACHE``, else ``$XDG_CACHE_HOME/paceline``, else ``~/.cache/paceline``."""
    if explicit := os.environ.get("PACELINE_CACHE"):
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by new content: readers see the old or the new one, also after a crash. Raises: OSError."""
    with staged_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def staged_file(place: Path) -> Iterator[Path]:
    """A path to write a file at, which takes its place when the block ends well, and vanishes otherwise.

    The name is the process's own: its threads must not stage the same place at a time.
    Raises: OSError; the older file is as it was then.
    """
    partial = place.with_name(f".{place.name}{_PARTIAL}{os.getpid()}")
    try:
        yield partial
        sync(partial)
        os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def staged_folder(place: Path) -> Iterator[Path]:
    """A new folder beside `place` that takes its place when the block ends well, and vanishes otherwise.

    An older folder at `place` stays until the new one is on the disk, and is removed then. What killed processes left
    beside it is cleaned up first.
    Raises: OSError; the older folder is as it was then.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(place)
    partial = place.with_name(f".{place.name}{_PARTIAL}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        sync_tree(partial)
        _swap(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_leftovers(place: Path) -> None:
    """Undo what a killed process left beside `place`: a swap cut short, and folders of processes that are gone."""
    old = place.with_name(f".{place.name}{_REPLACED}")
    if old.exists() and not place.exists():
        os.rename(old, place)
    shutil.rmtree(old, ignore_errors=True)
    prefix = f".{place.name}{_PARTIAL}"
    for path in place.parent.iterdir():
        pid = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and pid.isdecimal() and (int(pid) == os.getpid() or not is_running(int(pid))):
            shutil.rmtree(path, ignore_errors=True)


def writer_of(place: Path) -> int | None:
    """Another process that is writing a folder which will take this place; None if there is none."""
    prefix = f".{place.name}{_PARTIAL}"
    pids = [path.name.removeprefix(prefix) for path in place.parent.glob(f"{glob.escape(prefix)}*")]
    others = [int(pid) for pid in pids if pid.isdecimal() and int(pid) != os.getpid()]
    return next((pid for pid in others if is_running(pid)), None)


@contextmanager
def locked(path: Path, busy: Callable[[str], Exception]) -> Iterator[None]:
    """Hold a lock file; the kernel lets go of it when the process ends, however it ends.

    Args:
        busy: Makes the exception to raise if another process holds it, from that process's id.
    """
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise busy(file.read().strip() or "unknown") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_running(pid: int) -> bool:
    """Whether a process of this machine has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync_tree(folder: Path) -> None:
    """Force a folder's files, then the folders themselves, to the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Force one file, or the entries of one folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _swap(partial: Path, place: Path) -> None:
    old = place.with_name(f".{place.name}{_REPLACED}")
    if place.exists():
        os.rename(place, old)
    try:
        os.rename(partial, place)
    except OSError:
        if old.exists():
            os.rename(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)
    sync(place.parent)
