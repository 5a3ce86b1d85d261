"""Target roles: which failures are tried again, and what is refused."""

from __future__ import annotations

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
