"""Several batches under way in one target: threads and roles, and what counts as idle."""

from __future__ import annotations

import threading

import pytest
import torch

from paceline.errors import PipelineError
from paceline.pipeline import lanes
from paceline.pipeline.coordinator import Coordinator
from paceline.pipeline.lanes import Idle, Lanes
from paceline.pipeline.local import open_stream
from paceline.records import FeatureBatch, TokenBatch


def batch(number: int) -> FeatureBatch:
    tokens = TokenBatch.pack(number, [(number, torch.arange(4), torch.ones(4, dtype=torch.int64))], 6)
    return FeatureBatch(tokens, torch.full((6, 2), float(number)))


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_a_target_is_idle_while_no_call_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that ends the idleness has it; time before the first call is a start and no wait."""
    clock = Clock()
    monkeypatch.setattr(lanes, "time", clock)
    idle = Idle()
    clock.now = 5.0
    with idle.call() as first:
        clock.now = 6.0
        with idle.call() as second:
            clock.now = 7.0
        clock.now = 7.5
    clock.now = 9.5
    with pytest.raises(ValueError), idle.call() as third, idle.call() as fourth:
        raise ValueError
    clock.now = 10.5
    with idle.call() as fifth:
        pass
    assert (first, second, third, fourth, fifth) == (0.0, 0.0, 2.0, 0.0, 1.0)


def test_lanes_make_batches_at_a_time_and_deliver_in_order() -> None:
    """No lane goes on before the others have a batch as well; an error of one of them ends the stream."""
    together = threading.Barrier(3)

    def make(number: int) -> FeatureBatch:
        if number < 3:
            together.wait(20)
        if number == 9:
            raise ValueError("broken")
        return batch(number)

    made = Lanes(make, 3)
    coordinator, seen = Coordinator(0, 12), []
    with (
        pytest.raises(PipelineError, match="target-0 failed on batch 9: ValueError: broken"),
        open_stream(
            make, coordinator, layout="split", targets=1, threads=1, queue_depth=4, max_bytes=10**6, min_ready=1,
            elsewhere=made,
        ) as stream,
    ):  # fmt: skip
        for each in stream:
            seen.append(each.tokens.number)
            coordinator.trained([each.tokens.number])
    assert seen == list(range(len(seen))) and len(seen) <= 9
    assert made.take_idle() >= 0.0 and made.take_idle() == 0.0
