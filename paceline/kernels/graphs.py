"""CUDA graphs for work that is launch-bound, found out by measuring.

A small model's kernels are shorter than the time it takes to launch them. Recorded once and replayed as a graph, they
follow one another without gaps. A large model gains nothing and keeps its memory free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from paceline.profiling import stages

log = logging.getLogger(__name__)

WARM_UP_CALLS = 2
"""Calls before the measured one: compiling and the choice of kernels happen in the first, caches fill in the second."""

RECORDING_CALLS = WARM_UP_CALLS + 3
"""Calls of a variant after which it is recorded, in mode ``on``, whatever was called before."""

LAUNCH_BOUND = 0.8
"""Share of the device's time that launching takes from which on work counts as launch-bound."""


class GraphRunner:
    """Runs work on the current device, and replays it from a CUDA graph once that is known to pay.

    The work may read only tensors that stay in place and must leave its results in such; it may not wait for the
    device. It is called as it is for `WARM_UP_CALLS`, then once between two events; where the host needed most of that
    time to launch it, each variant is launched once more, recorded at its next call and replayed from then on.

    Args:
        work: The launches; its argument says which variant of the work, each with a graph of its own.
        name: For the log.
        mode: ``auto``, ``on`` (no measurement) or ``off``.
        prepare: Called once before the first recording: for buffers that only a graph needs.
        recover: Called when a recording has failed, before the work is launched: to drop what it has left half-made.

    Attributes:
        note: Why work is replayed or not, in one line.
    """

    def __init__(
        self,
        work: Callable[[int], None],
        name: str,
        mode: str,
        prepare: Callable[[], None] = lambda: None,
        recover: Callable[[], None] = lambda: None,
    ) -> None:
        self._work = work
        self._prepare = prepare
        self._recover = recover
        self._name = name
        self._mode = mode
        self._calls = 0
        self._seen: set[int] = set()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._failed: torch.cuda.CUDAGraph | None = None
        self._is_decided = False
        notes = {"auto": "not measured yet", "on": "replayed from a CUDA graph"}
        self.note = notes.get(mode, "launched kernel by kernel")
        self.is_replaying = False

    @property
    def needs_fixed_inputs(self) -> bool:
        """Whether a graph reads the inputs, or may come to."""
        return self._mode != "off" and (self.is_replaying or not self._is_decided)

    def __call__(self, variant: int = 0) -> None:
        """Do the work."""
        self._calls += 1
        is_new = variant not in self._seen
        self._seen.add(variant)  # what it has to build or choose is neither timed nor recorded
        if self._mode != "off" and not self._is_decided and self._calls > WARM_UP_CALLS and not is_new:
            self._is_decided = True
            self._measure(variant)
        elif not self.is_replaying or is_new:
            self._work(variant)
        elif variant in self._graphs or self._record(variant):
            with stages.GRAPH_REPLAY:
                self._graphs[variant].replay()
        else:
            self._work(variant)

    def _measure(self, variant: int) -> None:
        if self._mode == "on":
            self._start_replaying()
            self._work(variant)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        started = time.perf_counter()
        self._work(variant)
        host_ms = 1e3 * (time.perf_counter() - started)
        end.record()
        end.synchronize()
        device_ms = begin.elapsed_time(end)
        if host_ms > LAUNCH_BOUND * device_ms:
            self._start_replaying()
        self.note = (
            f"{'replayed from a CUDA graph' if self.is_replaying else 'launched kernel by kernel'}: launching takes "
            f"{host_ms:.1f} ms of {device_ms:.1f} ms"
        )
        log.info("%s is %s", self._name, self.note)

    def _start_replaying(self) -> None:
        self.is_replaying = True
        self._seen.clear()  # buffers are other ones now
        self._prepare()

    def _record(self, variant: int) -> bool:
        """Whether the work could be recorded; if not, it is launched from now on."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._work(variant)
        except Exception as error:  # whatever cannot be recorded can still be launched
            torch.cuda.set_stream(stream)  # a recording that fails may leave its own behind
            self._failed = graph  # the allocator may still ask it where memory goes
            self._mode, self.is_replaying = "off", False
            self._graphs.clear()
            self._recover()
            reason = str(error.__context__ or error).splitlines() or [type(error).__name__]
            self.note = f"launched kernel by kernel, as recording failed: {reason[0]}"
            log.warning("%s is %s", self._name, self.note)
            return False
        self._graphs[variant] = graph
        return True
