"""Files of JSON lines that a run appends to: a disk that takes nothing for a while loses no line and ends no run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from paceline.files import explain

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Lines that wait in memory while the disk takes none, some 4 MB; older ones are dropped then, and counted."""

RETRY_S = 1.0
"""Seconds between attempts while the disk takes none: on a device with errors each can take long."""

_BLOCK_BYTES = 65_536


class LineLog:
    """Appends lines to a file, whole ones only: what a write left half done is cut off before the next.

    Nothing in here raises OSError. While the disk takes no lines they wait, with one warning when that begins and one
    when it is over. From any thread.

    Args:
        path: The file; made with the first line.
        stays_open: Whether to keep it open between lines, until `close`.
    """

    def __init__(self, path: Path, stays_open: bool = False) -> None:
        self.path = path
        self._stays_open = stays_open
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque()
        self._num_late = self._num_dropped = 0
        self._retry_at: float | None = None  # None: it works
        self._has_sync_failed = False

    def write(self, line: dict[str, Any], room: int = 0) -> None:
        """Append a line and hand it to the kernel, so that a killed process loses none.

        Args:
            room: Blanks at its end, for whoever has to add to it later.
        """
        data = json.dumps(line).encode() + b" " * room + b"\n"
        with self._lock:
            self._waiting.append(data)
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
            if self._retry_at is None or time.monotonic() >= self._retry_at:
                self._write_waiting()

    def sync(self) -> None:
        """Force what was written to the disk; writing goes on meanwhile."""
        with self._lock:
            if self._waiting:
                self._write_waiting()
            descriptor = None if self._descriptor is None else os.dup(self._descriptor)
        try:
            if descriptor is None:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            os.fdatasync(descriptor)
        except FileNotFoundError:  # nothing was written
            pass
        except OSError as error:
            if not self._has_sync_failed:
                log.warning("%s is written, but not known to be on the disk: %s", self.path, explain(error))
            self._has_sync_failed = True
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        """Try what waits once more, force it to the disk, and close; lines that are lost then are counted."""
        self.sync()
        with self._lock:
            if self._waiting:
                log.error("%s lacks the last %d lines: the disk took none", self.path, len(self._waiting))
                self._waiting.clear()
            self._let_go()

    def _write_waiting(self) -> None:
        try:
            if self._descriptor is None:
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o666)
            self._append(self._descriptor)
        except OSError as error:
            if self._retry_at is None:
                log.warning("%s cannot be written, and its lines wait in memory: %s", self.path, explain(error))
                self._num_late = 0
            self._retry_at = time.monotonic() + RETRY_S
            self._let_go()
            return
        if self._retry_at is not None:
            dropped = f"; {self._num_dropped} older ones were dropped" if self._num_dropped else ""
            log.warning("%s is written again, with %d lines that waited%s", self.path, self._num_late, dropped)
            self._retry_at, self._num_late, self._num_dropped = None, 0, 0
        if not self._stays_open:
            self._let_go()

    def _append(self, descriptor: int) -> None:
        """Write all that waits. Raises: OSError; what got out in whole lines is out, and the rest waits."""
        start = _cut_torn_line(descriptor)
        data, written = b"".join(self._waiting), 0
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:] if written else data)
        finally:
            whole = data.rfind(b"\n", 0, written) + 1
            for _ in range(data.count(b"\n", 0, whole)):
                self._waiting.popleft()
                self._num_late += 1
            if written > whole:
                with contextlib.suppress(OSError):  # else it is cut off before the next line
                    os.ftruncate(descriptor, start + whole)

    def _let_go(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # late news of an earlier write, on a network file system
                os.close(self._descriptor)
            self._descriptor = None


def _cut_torn_line(descriptor: int) -> int:
    """Cut off what stands after the last line end; the file's size then. Raises: OSError."""
    size = end = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    while end:
        start = max(0, end - _BLOCK_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)
    return end
