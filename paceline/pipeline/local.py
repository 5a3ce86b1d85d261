"""The local executor: one process, one device; target roles are threads beside the drafter, or everything in turn.

A role is handed a callable that makes the features of batch n. The drafter side is an iterator: the training loop takes
batches from it in order and knows neither threads nor queues.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from paceline.errors import PacelineError, PipelineError, ServerError
from paceline.pipeline.channel import ChannelClosed, OrderedChannel, Waits
from paceline.pipeline.coordinator import Coordinator
from paceline.profiling import stages
from paceline.profiling.device import DeviceClock
from paceline.records import FeatureBatch

log = logging.getLogger(__name__)

MakeFeatures = Callable[[int], FeatureBatch]
"""Features of batch n; called from several threads at once."""

ShouldStop = Callable[[], object]
"""True-like once a stop has been asked for."""

POLL_S = 0.5
"""Seconds between looks at `ShouldStop` while the drafter waits for a batch."""

RETRY_S = 0.1
"""Seconds before a batch is made again; doubled with each retry."""


class Elsewhere(Protocol):
    """Targets in other processes: each lane is a thread here that waits for one of their calls."""

    lanes: int
    """Threads of a target: with two, one call is made while the result of another travels."""

    def lane(self, role: str) -> MakeFeatures:
        """What makes features for the threads of this role."""

    def take_idle(self) -> float:
        """Seconds since the last call in which targets had nothing to do, summed over them."""


class FeatureStream(Protocol):
    """Batches in the order of their numbers, with the state of the queue that they come through."""

    def __iter__(self) -> Iterator[FeatureBatch]: ...

    def take_waits(self) -> Waits:
        """What was waited since the last call."""

    def num_ready(self) -> int:
        """Batches waiting in the queue."""


class InTurn:
    """Target and drafter take turns in one thread: nothing waits, nothing is queued.

    On a GPU the thread only launches the target's work, and is held up for either side's sake wherever the launch queue
    is full: the target's turn is timed on the device, and counts once it is over there.
    """

    def __init__(self, make_features: MakeFeatures, coordinator: Coordinator, max_retries: int = 0) -> None:
        self._maker = Maker(make_features, coordinator, max_retries)
        self._coordinator = coordinator
        self._get_wait_s = self._total_wait_s = 0.0
        self._clock: DeviceClock | None = None

    def __iter__(self) -> Iterator[FeatureBatch]:
        while (number := self._coordinator.lease("target-0")) is not None:
            started = time.perf_counter()
            pair = None if self._clock is None else self._clock.begin()
            with stages.GET_WAIT, stages.as_role("target-0"):
                batch = self._maker.make("target-0", number)
            if self._clock is not None and pair is not None:
                self._clock.end(pair, stage=0)
            else:
                self._count(time.perf_counter() - started)
            if self._clock is None and batch.context_feature.is_cuda:  # from the next batch on
                self._clock = DeviceClock()
            self._harvest()
            self._coordinator.delivered(number)
            with stages.as_role("target-0"):
                stages.PUT_WAIT.__enter__()  # until the drafter asks again
            try:
                yield batch
            finally:
                with stages.as_role("target-0"):
                    stages.PUT_WAIT.__exit__(None, None, None)

    def _count(self, seconds: float) -> None:
        self._get_wait_s += seconds
        self._total_wait_s += seconds
        stages.set_gauge("get_wait_ns", int(1e9 * self._total_wait_s))

    def _harvest(self) -> None:
        """Count the turns that the device has done."""
        if self._clock is not None:
            self._clock.harvest(lambda stage, device_ns, lag_ns, is_drained: self._count(device_ns / 1e9))

    def take_waits(self) -> Waits:
        """No put wait; the get wait is the target's own time, for which the drafter stood still."""
        self._harvest()
        waits, self._get_wait_s = Waits(0.0, self._get_wait_s, 0.0), 0.0
        return waits

    def num_ready(self) -> int:
        return 0


class TargetThreads:
    """N target threads fill an ordered channel; the caller's thread is the drafter."""

    def __init__(
        self,
        make_features: MakeFeatures,
        coordinator: Coordinator,
        channel: OrderedChannel,
        should_stop: ShouldStop,
        *,
        targets: int,
        threads: int,
        max_retries: int = 0,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._make_features, self._max_retries = make_features, max_retries
        self._elsewhere = elsewhere
        self._should_stop = should_stop
        self._coordinator = coordinator
        self._channel = channel
        self._threads = [
            threading.Thread(target=self._run, args=(f"target-{i}", threads), name=f"target-{i}", daemon=True)
            for _ in range(1 if elsewhere is None else elsewhere.lanes)  # first batches of all come first
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
        waits = self._channel.take_waits()  # a lane that waits to put is no target that waits
        return waits if self._elsewhere is None else waits._replace(put_s=self._elsewhere.take_idle())

    def num_ready(self) -> int:
        return self._channel.num_ready

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
            name = role if self._elsewhere is None else role.replace("target", "lane")  # it is no target itself
            with stages.named_thread(name), stages.as_role(name):
                torch.set_num_threads(threads)  # a new thread would otherwise take the machine's default
                make = self._make_features if self._elsewhere is None else self._elsewhere.lane(role)
                maker = Maker(make, self._coordinator, self._max_retries)
                while (number := self._coordinator.lease(role)) is not None:
                    self._channel.put(maker.make(role, number))
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
    coordinator: Coordinator,
    *,
    layout: str,
    targets: int,
    threads: int,
    queue_depth: int,
    max_bytes: int,
    min_ready: int,
    batches_per_step: int = 1,
    should_stop: ShouldStop = lambda: False,
    max_retries: int = 0,
    elsewhere: Elsewhere | None = None,
) -> Iterator[FeatureStream]:
    """Features of the coordinator's batches, made ahead by target threads (``split``) or on demand (``colocated``).

    The threads are stopped and joined on leaving, whatever the reason. The iteration ends early when a stop is asked
    for while it waits. A target that fails makes its batch again up to `max_retries` times. Targets that are
    `elsewhere` are driven by the same threads, which wait for them.
    Raises: PipelineError from the iteration when a target fails, with the original exception as its cause.
    """
    stages.set_gauge("targets", targets)
    if layout == "colocated":
        yield InTurn(make_features, coordinator, max_retries)
        return
    channel = OrderedChannel(
        coordinator.first,
        coordinator.end,
        queue_depth=queue_depth,
        max_bytes=max_bytes,
        min_ready=min_ready,
        batches_per_step=batches_per_step,
    )
    stream = TargetThreads(
        make_features,
        coordinator,
        channel,
        should_stop,
        targets=targets,
        threads=threads,
        max_retries=max_retries,
        elsewhere=elsewhere,
    )
    stream.start()
    try:
        yield stream
    finally:
        stream.stop()


class Maker:
    """Makes the features of a batch, again where that may help."""

    def __init__(self, make_features: MakeFeatures, coordinator: Coordinator, max_retries: int) -> None:
        self._make_features, self._coordinator, self._max_retries = make_features, coordinator, max_retries

    def make(self, role: str, number: int) -> FeatureBatch:
        """Raises: PipelineError under the role's name and batch, with what went wrong as its cause."""
        for retry in itertools.count():
            stages.next_batch(number)
            try:
                batch = self._make_features(number)
                _check(batch, role, number)
                return batch
            except ChannelClosed:  # a stop was asked for meanwhile
                raise
            except Exception as error:  # whatever it is, it ends the run when it comes again
                if retry >= self._max_retries or not may_pass(error):
                    if isinstance(error, PipelineError):
                        raise
                    times = f" {retry + 1} times" if retry else ""
                    raise PipelineError(
                        f"{role} failed{times} on batch {number}: {type(error).__name__}: {error}",
                        role=role,
                        batch=number,
                    ) from error
                self._coordinator.retried()
                log.warning(
                    "%s failed on batch %d: %s: %s; it is made again (%d of %d)",
                    role, number, type(error).__name__, error, retry + 1, self._max_retries,
                )  # fmt: skip
                time.sleep(RETRY_S * 2**retry)
        raise AssertionError


def may_pass(error: Exception) -> bool:
    """Whether a failure may not come again: no error of ours but a server's, no lack of memory, no broken device."""
    if isinstance(error, ServerError):
        return True
    if isinstance(error, PipelineError):
        return error.may_pass
    if isinstance(error, PacelineError) or is_out_of_memory(error):
        return False
    return "CUDA error" not in str(error)  # after one, every call of the process fails


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, of the device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _check(batch: FeatureBatch, role: str, number: int) -> None:
    """Features are those of the batch that was asked for, all of them: never cut or padded to fit."""
    wanted = len(batch.tokens.input_ids)
    hidden = [batch.context_feature] + ([] if batch.last_hidden is None else [batch.last_hidden])
    found = next((len(each) for each in hidden if len(each) != wanted), wanted)
    if batch.tokens.number != number or found != wanted:
        seen = f"features of batch {batch.tokens.number}, {found} tokens of {wanted}"
        raise PipelineError(
            f"{role} delivered {seen}, where batch {number} was wanted with all {wanted}",
            role=role,
            batch=number,
            may_pass=True,
        )
