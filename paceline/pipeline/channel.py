"""A bounded channel that delivers batches in the order of their numbers, whoever made them first.

Capacity is a window of batch numbers and a number of bytes. The batch that the consumer needs next always fits, so
producers that hold later ones can never lock it out. Both waits are always measured.
"""

from __future__ import annotations

import threading
import time

from paceline.records import FeatureBatch


class ChannelClosed(Exception):
    """The other side is gone: there is nothing left to put or get."""


class OrderedChannel:
    """Batches ``first, first + 1, ... end - 1`` from several producers to one consumer, in order.

    Args:
        first: Number of the first batch.
        end: Number after the last batch.
        queue_depth: Batches that may wait; a producer with a batch beyond the window blocks in `put`.
        max_bytes: Bytes that may wait; the batch needed next passes regardless.
        min_ready: Consecutive batches that must be ready before `get` returns one, as far as batches are left.
    """

    def __init__(self, first: int, end: int, *, queue_depth: int, max_bytes: int, min_ready: int = 1) -> None:
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
        self._put_wait_s = 0.0
        self._get_wait_s = 0.0

    def put(self, batch: FeatureBatch) -> None:
        """Hand over a batch; blocks while its number or its bytes are beyond the capacity.

        Raises: ChannelClosed when the consumer is gone.
        """
        number, num_bytes = batch.tokens.number, batch.num_bytes
        started = time.perf_counter()
        with self._changed:
            while not self._closed and not self._fits(number, num_bytes):
                over_bytes = number < self._next + self._queue_depth
                self._waiting_for_bytes += over_bytes
                if over_bytes:
                    self._changed.notify_all()  # the consumer may be waiting for `min_ready`, which cannot come
                self._changed.wait()
                self._waiting_for_bytes -= over_bytes
            self._put_wait_s += time.perf_counter() - started
            if self._closed:
                raise ChannelClosed
            self._batches[number] = batch
            self._num_bytes += num_bytes
            self._changed.notify_all()

    def get(self, timeout_s: float | None = None) -> FeatureBatch | None:
        """The next batch in order; blocks until it is ready, or returns None after `timeout_s` seconds.

        Raises: ChannelClosed after the last batch; a producer's failure as soon as it is known, batches that are still
        waiting notwithstanding.
        """
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(self._is_decided, timeout_s)
            self._get_wait_s += time.perf_counter() - started
            if self._failure is not None:
                raise self._failure
            if self._closed or self._next >= self._end:
                raise ChannelClosed
            if not self._is_ready():
                return None
            batch = self._batches.pop(self._next)
            self._next += 1
            self._num_bytes -= batch.num_bytes
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
            self._changed.notify_all()

    @property
    def num_ready(self) -> int:
        """Batches that wait in the channel."""
        with self._changed:
            return len(self._batches)

    def take_waits(self) -> tuple[float, float]:
        """Seconds blocked since the last call: producers in `put` (summed over them), the consumer in `get`."""
        with self._changed:
            waits = self._put_wait_s, self._get_wait_s
            self._put_wait_s = self._get_wait_s = 0.0
            return waits

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
