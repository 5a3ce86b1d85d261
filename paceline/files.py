"""Files and folders that appear whole or not at all, also when the process is killed or the disk is full.

Besides: where this user's cache is.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PARTIAL, _REPLACED = ".partial-", ".replaced"
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}
_REMEDIES = {
    errno.ENOSPC: "free space on this disk",
    errno.EDQUOT: "free space within your quota",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
    errno.EROFS: "mount the file system so that it can be written",
    errno.EIO: "the device has errors: look at the kernel's log",
}
_CREDENTIALS = re.compile(r"(\w://)(?:[^\s/?#@:]*:[^\s]*|[^\s/?#@]*)@")


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

    The name is the process's own: its threads must not stage the same place at a time. What killed processes left
    beside it is cleaned up first.
    Raises: OSError; the older file is as it was then.
    """
    with suppress(OSError):  # a folder that cannot be listed can be written to all the same
        _remove_partial(place)
    partial = place.with_name(f".{place.name}{_PARTIAL}{os.getpid()}")
    try:
        yield partial
        sync(partial)
        os.replace(partial, place)
        sync(place.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def staged_folder(place: Path) -> Iterator[Path]:
    """A new folder beside `place` that takes its place when the block ends well, and vanishes otherwise.

    What is at `place`, a folder or anything else, stays until the new one is on the disk, and is removed then. What
    killed processes left beside it is cleaned up first.
    Raises: OSError; the older folder is as it was then.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(place)
    partial = place.with_name(f".{place.name}{_PARTIAL}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        sync_tree(partial)
        swap(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_leftovers(place: Path) -> None:
    """Undo what a killed process left beside `place`: a swap cut short, and folders of processes that are gone."""
    old = place.with_name(f".{place.name}{_REPLACED}")
    if os.path.lexists(old) and not os.path.lexists(place):
        os.rename(old, place)
    remove(old)
    _remove_partial(place)


def _remove_partial(place: Path) -> None:
    prefix = f".{place.name}{_PARTIAL}"
    for path in place.parent.iterdir():
        pid = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and pid.isdecimal() and (int(pid) == os.getpid() or not is_running(int(pid))):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder as far as that can be done; nothing there is fine."""
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


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
    Raises: OSError, also where the file system has no locks.
    """
    with open(path, "ab+", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise busy(file.read().decode("ascii", "replace").strip() or "unknown") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            reason = "its file system has no locks, without which two processes could write there: take another folder"
            raise OSError(error.errno, f"{os.strerror(error.errno)}; {reason}", str(path)) from error
        with suppress(OSError):  # on a full disk the lock holds all the same, without a name
            file.truncate(0)
            file.write(str(os.getpid()).encode())
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
    """Force one file, or the entries of one folder, to the disk; some file systems have no such thing for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def child(folder: Path, name: object) -> Path:
    """The path of an entry of a folder whose name was read from a file, so that it cannot lead anywhere else.

    Raises: ValueError if it is no plain name.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{str(name)!r:.200} is no name of a file in {folder}")
    return folder / name


def without_credentials(content: Any) -> Any:
    """A tree of plain values with user and password in URLs masked, for what is written down and shown to others."""
    if isinstance(content, str):
        return _CREDENTIALS.sub(r"\1***@", content)
    if isinstance(content, dict):
        return {key: without_credentials(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_credentials(value) for value in content]
    return content


def explain(error: OSError) -> str:
    """What went wrong with a file, and what helps where that is known."""
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{reason}; {remedy}" if remedy else reason


def swap(partial: Path, place: Path) -> None:
    """Give a folder that is on the disk its place; what was there has the name ``.NAME.replaced`` meanwhile.

    Raises: OSError; the older one is back in its place then.
    """
    old = place.with_name(f".{place.name}{_REPLACED}")
    if os.path.lexists(place):
        os.rename(place, old)
    try:
        os.rename(partial, place)
    except OSError:
        if os.path.lexists(old):
            os.rename(old, place)
        raise
    sync(place.parent)  # before the older one goes
    remove(old)
