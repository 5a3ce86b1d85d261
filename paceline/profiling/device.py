"""Time on the device: pairs of CUDA events around stages, read when they are done and never waited for.

An event costs what a launch costs, so only one batch in `every` is timed. The run-ahead lag of a stage is the time from
when the host had launched it until the device had finished it: near zero, the device had nothing else to do and waits
for the host (launch-bound); many milliseconds, the host is ahead, and the device is what limits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

DRAINED_NS = 100_000
"""Run-ahead lag below which the device counts as having waited for the host (or below 2 % of the stage)."""

DRAINED_FRAC = 0.02
MAX_PENDING = 64

Settle = Callable[[int, int, int | None, bool], None]
"""Takes a stage's number, its nanoseconds on the device, its lag if it is known, and whether that means drained."""


class Pair:
    """Two events around a stage."""

    __slots__ = ("begin", "busy_ns", "end", "host_ns", "stage")

    def __init__(self) -> None:
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.stage = 0
        self.host_ns = 0
        self.busy_ns = 0  # the host's clock when the device was last seen not to have finished it


class DeviceClock:
    """Events of one thread in one role, on its current stream."""

    def __init__(self) -> None:
        self._pool: list[Pair] = []
        self._pending: deque[Pair] = deque()
        self._anchor: tuple[Any, int] | None = None
        self._last: Pair | None = None
        self._last_is_of_this_batch = False
        self._has_failed = False

    def next_batch(self) -> None:
        """A batch begins that is timed: what stands on the stream before it is not known."""
        self._last_is_of_this_batch = False

    def begin(self) -> Pair | None:
        """Record an event; None while launches are being recorded for a graph, or too many pairs are under way."""
        try:
            return self._begin()
        except RuntimeError as error:
            self._fail(error)
            return None

    def end(self, pair: Pair, stage: int) -> None:
        """Record the second event."""
        try:
            self._end(pair, stage)
        except RuntimeError as error:
            self._fail(error)

    def harvest(self, settle: Settle) -> None:
        """Give what is done to `settle`."""
        try:
            self._harvest(settle)
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: RuntimeError) -> None:
        """An event failed: either so did the device, of which the run will hear, or the run is worth more than this."""
        if not self._has_failed:
            log.warning("stages are not timed on the device any more: %s", str(error).splitlines()[:1])
        self._has_failed = True
        self._pending.clear()

    def _begin(self) -> Pair | None:
        if self._has_failed or len(self._pending) >= MAX_PENDING or torch.cuda.is_current_stream_capturing():
            return None
        self._look()
        pair = self._pool.pop() if self._pool else Pair()
        is_idle = self._last_is_of_this_batch and self._last is not None and self._last.end.query()
        pair.begin.record()
        if is_idle:  # then the event is reached at once, which ties the device's clock to the host's
            self._anchor = pair.begin, time.monotonic_ns()
        return pair

    def _end(self, pair: Pair, stage: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        pair.end.record()
        pair.host_ns, pair.stage, pair.busy_ns = time.monotonic_ns(), stage, 0
        self._pending.append(pair)
        self._last, self._last_is_of_this_batch = pair, True

    def synchronised(self, event: Any) -> None:
        """The host has just waited for this (timed) event: that ties the device's clock to the host's as well."""
        self._anchor = event, time.monotonic_ns()

    def _look(self) -> None:
        """Note which pairs the device has not finished: a floor of their lag, where no wait ties the two clocks.

        A host that fills the launch queue is held up in launching, never waits for an event, and would look unknown.
        """
        now = time.monotonic_ns()
        for pair in reversed(self._pending):
            if pair.end.query():
                break  # the device goes by their order: those before it are done too
            pair.busy_ns = now

    def _harvest(self, settle: Settle) -> None:
        self._look()
        while self._pending and self._pending[0].end.query():
            pair = self._pending.popleft()
            device_ns = int(1e6 * pair.begin.elapsed_time(pair.end))
            lag_ns = None
            if self._anchor is not None and self._anchor[0].query():
                event, host_ns = self._anchor
                lag_ns = max(0, host_ns + int(1e6 * event.elapsed_time(pair.end)) - pair.host_ns)
            least = max(DRAINED_NS, DRAINED_FRAC * device_ns)
            if lag_ns is None and pair.busy_ns - pair.host_ns > least:
                lag_ns = pair.busy_ns - pair.host_ns
            is_drained = lag_ns is not None and lag_ns < least
            settle(pair.stage, device_ns, lag_ns, is_drained)
            if pair is not self._last and (self._anchor is None or self._anchor[0] is not pair.begin):
                self._pool.append(pair)
