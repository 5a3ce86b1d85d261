"""The local executor: one process, one device; target roles are threads beside the drafter, or everything in turn.

A role is handed a callable that makes the features of batch n. The drafter side is an iterator: the training loop takes
batches from it in order and knows neither threads nor queues.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from paceline.errors import PipelineError
from paceline.pipeline.channel import ChannelClosed, OrderedChannel, Waits
from paceline.pipeline.coordinator import Coordinator, Ledger
from paceline.profiling import stages
from paceline.records import FeatureBatch

log = logging.getLogger(__name__)

MakeFeatures = Callable[[int], FeatureBatch]
"""Features of batch n; called from several threads at once."""

ShouldStop = Callable[[], object]
"""True-like once a stop has been asked for."""

POLL_S = 0.5
"""Seconds between looks at `ShouldStop` while the drafter waits for a batch."""


class FeatureStream(Protocol):
    """Batches in the order of their numbers, with the state of the queue that they come through."""

    def __iter__(self) -> Iterator[FeatureBatch]: ...

    def take_waits(self) -> Waits:
        """What was waited since the last call."""

    def num_ready(self) -> int:
        """Batches waiting in the queue."""

    def ledger(self) -> Ledger:
        """Where the batches are."""


class InTurn:
    """Target and drafter take turns in one thread: nothing waits, nothing is queued."""

    def __init__(self, make_features: MakeFeatures, first: int, end: int) -> None:
        self._make_features = make_features
        self._coordinator = Coordinator(first, end)
        self._get_wait_s = self._total_wait_s = 0.0

    def __iter__(self) -> Iterator[FeatureBatch]:
        while (number := self._coordinator.lease("target-0")) is not None:
            started = time.perf_counter()
            with stages.GET_WAIT, stages.as_role("target-0"):
                batch = _make(self._make_features, "target-0", number)
            waited_s = time.perf_counter() - started
            self._get_wait_s += waited_s
            self._total_wait_s += waited_s
            stages.set_gauge("get_wait_ns", int(1e9 * self._total_wait_s))
            self._coordinator.delivered(number)
            with stages.as_role("target-0"):
                stages.PUT_WAIT.__enter__()  # until the drafter asks again
            try:
                yield batch
            finally:
                with stages.as_role("target-0"):
                    stages.PUT_WAIT.__exit__(None, None, None)

    def take_waits(self) -> Waits:
        """No put wait; the get wait is the target's own time, for which the drafter stood still."""
        waits, self._get_wait_s = Waits(0.0, self._get_wait_s, 0.0), 0.0
        return waits

    def num_ready(self) -> int:
        return 0

    def ledger(self) -> Ledger:
        return self._coordinator.ledger()


class TargetThreads:
    """N target threads fill an ordered channel; the caller's thread is the drafter."""

    def __init__(
        self,
        make_features: MakeFeatures,
        first: int,
        end: int,
        channel: OrderedChannel,
        should_stop: ShouldStop,
        *,
        targets: int,
        threads: int,
    ) -> None:
        self._make_features = make_features
        self._should_stop = should_stop
        self._coordinator = Coordinator(first, end)
        self._channel = channel
        self._threads = [
            threading.Thread(target=self._run, args=(f"target-{i}", threads), name=f"target-{i}", daemon=True)
            for i in range(targets)
        ]

    def start(self) -> None:
        """Start the target threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Release the target threads and join them; one that is in a forward pass is left to end with the process."""
        self._channel.close()
        deadline = time.monotonic() + timeout_s
        with stages.JOIN_TARGETS:
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning("%s is still in a forward pass; it ends with the process", thread.name)

    def __iter__(self) -> Iterator[FeatureBatch]:
        while (batch := self._next()) is not None:
            self._coordinator.delivered(batch.tokens.number)
            yield batch

    def take_waits(self) -> Waits:
        return self._channel.take_waits()

    def num_ready(self) -> int:
        return self._channel.num_ready

    def ledger(self) -> Ledger:
        return self._coordinator.ledger()

    def _next(self) -> FeatureBatch | None:
        """The next batch; None when there is none left, or a stop is asked for while waiting."""
        try:
            batch = self._channel.get(0.0)
        except ChannelClosed:
            return None
        if batch is None:
            with stages.GET_WAIT:  # one wait, however often it looks up
                try:
                    while batch is None and not self._should_stop():
                        batch = self._channel.get(POLL_S)
                except ChannelClosed:  # no failure of the wait
                    return None
        return batch

    def _run(self, role: str, threads: int) -> None:
        try:
            with stages.named_thread(role), stages.as_role(role):
                torch.set_num_threads(threads)  # a new thread would otherwise take the machine's default
                while (number := self._coordinator.lease(role)) is not None:
                    self._channel.put(_make(self._make_features, role, number))
        except ChannelClosed:
            return
        except PipelineError as error:
            self._channel.fail(error)
        except BaseException as error:  # whatever ends this thread, the drafter must not wait for it
            failure = PipelineError(f"{role} ended: {type(error).__name__}: {error}", role=role, batch=None)
            failure.__cause__ = error
            self._channel.fail(failure)


@contextlib.contextmanager
def open_stream(
    make_features: MakeFeatures,
    first: int,
    end: int,
    *,
    layout: str,
    targets: int,
    threads: int,
    queue_depth: int,
    max_bytes: int,
    min_ready: int,
    batches_per_step: int = 1,
    should_stop: ShouldStop = lambda: False,
) -> Iterator[FeatureStream]:
    """Features of batches ``[first, end)``, made ahead by target threads (``split``) or on demand (``colocated``).

    The threads are stopped and joined on leaving, whatever the reason. The iteration ends early when a stop is asked
    for while it waits.
    Raises: PipelineError from the iteration when a target fails, with the original exception as its cause.
    """
    stages.set_gauge("targets", targets)
    if layout == "colocated":
        yield InTurn(make_features, first, end)
        return
    channel = OrderedChannel(
        first,
        end,
        queue_depth=queue_depth,
        max_bytes=max_bytes,
        min_ready=min_ready,
        batches_per_step=batches_per_step,
    )
    stream = TargetThreads(make_features, first, end, channel, should_stop, targets=targets, threads=threads)
    stream.start()
    try:
        yield stream
    finally:
        stream.stop()


def _make(make_features: MakeFeatures, role: str, number: int) -> FeatureBatch:
    stages.next_batch(number)
    try:
        return make_features(number)
    except Exception as error:  # whatever it is, it ends the run under the role's name and batch
        raise PipelineError(
            f"{role} failed on batch {number}: {type(error).__name__}: {error}", role=role, batch=number
        ) from error
