"""A bounded channel that delivers batches in the order of their numbers, whoever made them first.

Capacity is a window of batch numbers and a number of bytes. The batch that the consumer needs next always fits, so
producers that hold later ones can never lock it out. Both waits are always measured.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from paceline.profiling import stages
from paceline.records import FeatureBatch


class ChannelClosed(Exception):
    """The other side is gone: there is nothing left to put or get."""


class Waits(NamedTuple):
    """Seconds blocked.

    Attributes:
        put_s: Producers by a full queue, summed over them.
        get_s: The consumer by an empty one, or by a batch that is not the next.
        ready_s: The part of `get_s` during which the batches of a whole step stood in the queue.
    """

    put_s: float
    get_s: float
    ready_s: float


class OrderedChannel:
    """Batches ``first, first + 1, ... end - 1`` from several producers to one consumer, in order.

    Args:
        first: Number of the first batch.
        end: Number after the last batch.
        queue_depth: Batches that may wait; a producer with a batch beyond the window blocks in `put`.
        max_bytes: Bytes that may wait; the batch needed next passes regardless.
        min_ready: Consecutive batches that must be ready before `get` returns one, as far as batches are left.
        batches_per_step: Batches that the consumer takes for a step; only `Waits.ready_s` asks.
    """

    def __init__(
        self,
        first: int,
        end: int,
        *,
        queue_depth: int,
        max_bytes: int,
        min_ready: int = 1,
        batches_per_step: int = 1,
    ) -> None:
        self._next = first
        self._end = end
        self._queue_depth = queue_depth
        self._max_bytes = max_bytes
        self._min_ready = min_ready
        self._batches: dict[int, FeatureBatch] = {}
        self._num_bytes = 0
        self._waiting_for_bytes = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._batches_per_step = batches_per_step
        self._putting: dict[int, float] = {}  # threads that wait in `put`, and since when they are to be counted
        self._put_wait_s = self._get_wait_s = self._ready_wait_s = 0.0
        self._total_put_s = self._total_get_s = self._total_ready_s = 0.0
        stages.set_gauge("queue_depth", queue_depth)
        stages.set_gauge("queue", 0)

    def put(self, batch: FeatureBatch) -> None:
        """Hand over a batch; blocks while its number or its bytes are beyond the capacity.

        Raises: ChannelClosed when the consumer is gone.
        """
        number, num_bytes = batch.tokens.number, batch.num_bytes
        with self._changed:
            if not self._closed and not self._fits(number, num_bytes):
                with stages.PUT_WAIT:
                    self._wait_to_put(number, num_bytes)
            if self._closed:
                raise ChannelClosed
            self._batches[number] = batch
            self._num_bytes += num_bytes
            stages.set_gauge("queue", len(self._batches))
            self._changed.notify_all()

    def get(self, timeout_s: float | None = None) -> FeatureBatch | None:
        """The next batch in order; blocks until it is ready, or returns None after `timeout_s` seconds.

        Raises: ChannelClosed after the last batch; a producer's failure as soon as it is known, batches that are still
        waiting notwithstanding.
        """
        with self._changed:
            if not self._is_decided():
                self._wait_to_get(timeout_s)
            if self._failure is not None:
                raise self._failure
            if self._closed or self._next >= self._end:
                raise ChannelClosed
            if not self._is_ready():
                return None
            batch = self._batches.pop(self._next)
            self._next += 1
            self._num_bytes -= batch.num_bytes
            stages.set_gauge("queue", len(self._batches))
            self._changed.notify_all()
            return batch

    def fail(self, failure: BaseException) -> None:
        """A producer failed: the consumer's next `get` raises it, and every other producer is released."""
        with self._changed:
            self._failure = self._failure or failure
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """The consumer takes no more: producers blocked in `put` are released, and what waits is dropped."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._num_bytes = 0
            stages.set_gauge("queue", 0)
            self._changed.notify_all()

    @property
    def num_ready(self) -> int:
        """Batches that wait in the channel."""
        with self._changed:
            return len(self._batches)

    def take_waits(self) -> Waits:
        """What was waited since the last call; of waits that go on, the part until now."""
        with self._changed:
            for thread in list(self._putting):
                self._count_put(thread)
            waits = Waits(self._put_wait_s, self._get_wait_s, self._ready_wait_s)
            self._put_wait_s = self._get_wait_s = self._ready_wait_s = 0.0
            return waits

    def _wait_to_put(self, number: int, num_bytes: int) -> None:
        thread = threading.get_ident()
        self._putting[thread] = time.perf_counter()
        stages.set_gauge("putting", len(self._putting))
        has_said = False
        while not self._closed and not self._fits(number, num_bytes):
            over_bytes = number < self._next + self._queue_depth
            self._waiting_for_bytes += over_bytes
            if over_bytes and not has_said:  # once: two of these would wake each other for ever
                self._changed.notify_all()  # the consumer may be waiting for `min_ready`, which cannot come
                has_said = True
            self._changed.wait()
            self._waiting_for_bytes -= over_bytes
        self._count_put(thread)
        del self._putting[thread]
        stages.set_gauge("putting", len(self._putting))

    def _count_put(self, thread: int) -> None:
        now = time.perf_counter()
        self._put_wait_s += now - self._putting[thread]
        self._total_put_s += now - self._putting[thread]
        self._putting[thread] = now
        stages.set_gauge("put_wait_ns", int(1e9 * self._total_put_s))

    def _wait_to_get(self, timeout_s: float | None) -> None:
        """Wait until there is something to return or raise; the queue changes only where this wakes up."""
        now = time.perf_counter()
        stages.set_gauge("getting_since_ns", time.monotonic_ns())
        end = None if timeout_s is None else now + timeout_s
        step = min(self._batches_per_step, max(1, self._queue_depth - 1))  # all that can stand beside a missing one
        while not self._is_decided() and (end is None or now < end):
            has_step = len(self._batches) >= min(step, self._end - self._next)
            self._changed.wait(None if end is None else end - now)
            waited, now = now, time.perf_counter()
            self._get_wait_s += now - waited
            self._total_get_s += now - waited
            self._ready_wait_s += (now - waited) * has_step
            self._total_ready_s += (now - waited) * has_step
        stages.set_gauge("getting_since_ns", 0)
        stages.set_gauge("get_wait_ns", int(1e9 * self._total_get_s))
        stages.set_gauge("ready_wait_ns", int(1e9 * self._total_ready_s))

    def _fits(self, number: int, num_bytes: int) -> bool:
        if number == self._next:
            return True
        return number < self._next + self._queue_depth and self._num_bytes + num_bytes <= self._max_bytes

    def _is_decided(self) -> bool:
        """Whether `get` need not wait any longer."""
        return self._failure is not None or self._closed or self._next >= self._end or self._is_ready()

    def _is_ready(self) -> bool:
        wanted = min(self._min_ready, self._end - self._next)
        if self._waiting_for_bytes:
            wanted = 1
        return all(number in self._batches for number in range(self._next, self._next + wanted))
