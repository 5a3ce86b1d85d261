"""A window of torch's own profiler, asked for while a run goes on: every operator and kernel of a few batches.

The drafter's thread starts and stops it, between micro-batches, as torch wants both from one thread; all threads are
recorded. It costs the run what torch's profiler costs: a second to start for the first time in a process, some
microseconds an operator while it is on, and on a GPU a wait for the device at the end. Nothing of it stays on. Let a
run make its first steps before: CUDA graphs are recorded there, and a recording bears no wait for the device.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from paceline.files import staged_file

log = logging.getLogger(__name__)

MAX_BATCHES = 50
"""Batches of one window: those of a large model make some 10 MB of trace each, before packing."""

MAX_S = 60.0
"""Seconds after which a window ends with the batches that it has."""

MIN_FREE_BYTES = 200 * 10**6
"""Free disk without which no window is begun."""

CLOSE_S = 30.0
"""Seconds that the end of a run waits for a window that is being written."""

_CHUNK_BYTES = 1 << 20
_EVENT = b'"ph": "X"'
_OPERATOR = re.compile(rb'"cat": "cpu_op",\s+"name": .*\s+"pid": \d+,\s+"tid": (\d+)')
_END_OF_EVENT = b"\n  }"


@dataclass
class _Request:
    """What was asked for, and what became of it.

    Attributes:
        recorded: Batches that the window holds so far.
        done: Set when the drafter's thread has nothing more to do with it.
        error: Why there is no window; None if there is one.
    """

    batches: int
    profiler: Any = None
    ends_at: float = 0.0
    recorded: int = 0
    is_given_up: bool = False
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)


class TorchWindow:
    """Takes requests from any thread, one at a time; the drafter's thread serves them in `poll`.

    Args:
        folder: Where ``torch-<time>.json.gz`` is written; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._request: _Request | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_free = threading.Event()
        self._is_free.set()

    def request(self, batches: int, timeout_s: float = 300.0) -> dict[str, Any]:
        """Record the next micro-batches and write them down; returns when that is done.

        The file is written by the calling thread, while the run goes on.
        Args:
            timeout_s: Seconds after which a window that is not over is given up.
        Returns: ``file``, its ``bytes``, ``batches`` recorded, ``threads`` with operators, and ``events``.
        Raises: RuntimeError saying what went wrong.
        """
        if not 1 <= batches <= MAX_BATCHES:
            raise RuntimeError(f"a window has 1 to {MAX_BATCHES} batches; {batches} were asked for")
        request = _Request(batches)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the run is over")
            if self._request is not None or not self._is_free.is_set():
                raise RuntimeError("a window is being recorded already")
            self._check_disk()
            self._is_free.clear()
            self._request = request
        try:
            if not request.done.wait(timeout_s):
                self._give_up(request)
                raise RuntimeError(f"the window was not over after {timeout_s:g} s, and is given up")
            if request.error is not None:
                raise RuntimeError(request.error)
            return self._write(request)
        finally:
            self._is_free.set()

    def poll(self) -> None:
        """Begin or end what was asked for; called by the drafter's thread between micro-batches. Never raises."""
        request = self._request
        if request is not None:
            self._serve(request)

    def close(self) -> None:
        """The drafter's thread is at the end of its batches: what is being recorded ends here, and is written."""
        with self._lock:
            self._is_closed = True
        request = self._request
        if request is not None:
            if request.profiler is None:
                self._leave(request, "the run is over")
            else:
                request.recorded += 1
                self._serve(request, is_last=True)
        if not self._is_free.wait(CLOSE_S):
            log.warning("a torch window is still being written to %s; the run does not wait for it", self._folder)

    def _check_disk(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise RuntimeError(f"{self._folder} cannot be written: {error.strerror}") from error
        if free < MIN_FREE_BYTES:
            raise RuntimeError(
                f"{self._folder} has {free / 1e6:.0f} MB free; a window needs {MIN_FREE_BYTES / 1e6:.0f} MB"
            )

    def _give_up(self, request: _Request) -> None:
        """A window that has begun can only be ended by the thread that began it."""
        with self._lock:
            request.is_given_up = True
            if request.profiler is None and self._request is request:
                self._request = None

    def _serve(self, request: _Request, is_last: bool = False) -> None:
        try:
            if request.profiler is None:
                with self._lock:
                    if self._request is request:
                        request.profiler = _started_profiler()
                        request.ends_at = time.monotonic() + MAX_S
                return
            request.recorded += not is_last
            is_over = request.recorded >= request.batches or time.monotonic() >= request.ends_at
            if is_over or is_last or request.is_given_up:
                request.profiler.stop()
                self._leave(request)
        except Exception as error:  # whatever it is, training goes on
            if request.profiler is not None:
                with contextlib.suppress(Exception):
                    request.profiler.stop()
            self._leave(request, f"torch's profiler failed: {type(error).__name__}: {error}")

    def _leave(self, request: _Request, error: str | None = None) -> None:
        request.error = error
        self._request = None
        request.done.set()

    def _write(self, request: _Request) -> dict[str, Any]:
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now * 1000) % 1000:03d}"
        place = self._folder / f"torch-{stamp}.json.gz"
        raw = place.with_name(f".{place.stem}.raw")  # not in the folder for temporary files, which may be small
        counts = _Counts()
        try:
            request.profiler.export_chrome_trace(str(raw))
            with staged_file(place) as partial, gzip.open(partial, "wb", compresslevel=5) as packed:
                with open(raw, "rb") as file:
                    for chunk in counts.over(file):
                        packed.write(chunk)
                if not counts.is_whole:  # torch writes on when the disk is full, and says nothing
                    raise RuntimeError(f"torch left its trace in {self._folder} incomplete: is the disk full?")
            size = place.stat().st_size
        except OSError as error:
            raise RuntimeError(f"the window cannot be written to {place}: {error.strerror or error}") from error
        finally:
            request.profiler = None  # with all its events
            raw.unlink(missing_ok=True)
        return {
            "file": str(place),
            "bytes": size,
            "batches": request.recorded,
            "threads": len(counts.threads),
            "events": counts.events,
        }


class _Counts:
    """Counts a trace as it passes by; parsing it whole would hold up the other threads.

    Attributes:
        threads: Ids of threads with operators.
        events: Operators, calls of the driver, kernels and copies.
        is_whole: Whether the text has come to its end.
    """

    def __init__(self) -> None:
        self.threads: set[bytes] = set()
        self.events = 0
        self.is_whole = False

    def over(self, file: BinaryIO) -> Iterator[bytes]:
        """The file's chunks."""
        rest = b""
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
            events, end, rest = (rest + chunk).rpartition(_END_OF_EVENT)
            if not end:
                continue
            self.events += events.count(_EVENT)
            self.threads.update(_OPERATOR.findall(events))
        self.is_whole = rest.rstrip().endswith(b"}")


def _started_profiler() -> Any:
    """No stacks, shapes or memory: each would cost many times what recording the operators costs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # else nothing of the targets
    profiler = profile(activities=activities, experimental_config=config)
    profiler.start()
    return profiler
