"""Target roles: which failures are tried again, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.errors import DataError, PipelineError, ServerError
from paceline.pipeline import local
from paceline.pipeline.coordinator import Coordinator
from paceline.pipeline.local import InTurn, may_pass
from paceline.records import FeatureBatch, TokenBatch


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (RuntimeError("a hiccup"), True),
        (ConnectionResetError("by peer"), True),
        (ServerError("gone"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (MemoryError(), False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), False),
        (DataError("a row"), False),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_what_may_pass_is_tried_again(error: Exception, passes: bool) -> None:
    """What would come again, or has broken the device, is not."""
    assert may_pass(error) is passes


def features(number: int, length: int = 4) -> FeatureBatch:
    """A batch of four tokens with features for `length` of them."""
    ids = torch.arange(4)
    tokens = TokenBatch.pack(number, [(0, ids, torch.ones(4, dtype=torch.bool))], 4)
    return FeatureBatch(tokens, torch.zeros(length, 2))


def test_a_batch_is_made_again_as_often_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the failure ends the run under role and batch, with its own cause and the number of tries."""
    monkeypatch.setattr(local, "RETRY_S", 0.0)
    tries, coordinator = [], Coordinator(5, 9)

    def fail(number: int) -> FeatureBatch:
        tries.append(number)
        raise RuntimeError("toy failure")

    with pytest.raises(PipelineError, match="target-0 failed 3 times on batch 5: RuntimeError: toy failure") as caught:
        next(iter(InTurn(fail, coordinator, max_retries=2)))
    assert tries == [5, 5, 5] and coordinator.ledger().retried == 2
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("delivered", "said"),
    [
        (features(7), r"features of batch 7, 4 tokens of 4, where batch 5 was wanted"),
        (features(5, length=3), r"features of batch 5, 3 tokens of 4, where batch 5 was wanted"),
        (features(5, length=5), r"features of batch 5, 5 tokens of 4, where batch 5 was wanted"),
    ],
)
def test_other_features_are_refused(delivered: FeatureBatch, said: str) -> None:
    """Of another batch, too few, or too many."""
    with pytest.raises(PipelineError, match=said):
        next(iter(InTurn(lambda number: delivered, Coordinator(5, 9))))


class FakeClock:
    """A device that is two batches behind the host, and takes 30 ms for each."""

    def __init__(self) -> None:
        self.under_way: list[int] = []
        self.begun = 0

    def begin(self) -> object | None:
        self.begun += 1
        return object() if self.begun != 3 else None  # too many under way: the host's clock counts

    def end(self, pair: object, stage: int) -> None:
        self.under_way.append(30_000_000)

    def harvest(self, settle: Callable[[int, int, int | None, bool], None]) -> None:
        while len(self.under_way) > 2:
            settle(0, self.under_way.pop(0), None, False)


def test_a_turn_on_a_gpu_is_timed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching says nothing of it: what the device took counts once it is known, and is counted once."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(local, "DeviceClock", FakeClock)
    stream = InTurn(features, Coordinator(0, 9))
    waits = []
    for _ in stream:
        waits.append(stream.take_waits().get_s)
    assert waits[0] < 0.02 and all(wait < 0.02 for wait in waits[1:4])  # by the host's clock, or not known yet
    assert waits[4:] == [pytest.approx(0.03)] * 5  # the first of them is of the third batch before
    assert stream.take_waits().get_s == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_tells_how_long_the_turns_took() -> None:
    """Work that is launched in no time and takes the device a while is the target's, and the drafter's is not."""
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    once_s = begin.elapsed_time(end) / 1e3

    def make(number: int) -> FeatureBatch:
        batch = features(number)
        torch.cuda._sleep(cycles)
        return FeatureBatch(batch.tokens, batch.context_feature.cuda())

    stream = InTurn(make, Coordinator(0, 7))
    for batch in stream:
        if batch.tokens.number == 0:
            torch.cuda.synchronize()
            stream.take_waits()
        torch.cuda._sleep(3 * cycles)
    torch.cuda.synchronize()
    found = stream.take_waits().get_s
    assert found == pytest.approx(6 * once_s, rel=0.2)
