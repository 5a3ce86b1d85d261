"""Another drafter kind needs a class and nothing else: the whole path, with every seam used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.eval.decode import CachedTarget, plain_decode, speculative_decode
from paceline.models import kinds
from paceline.models.draft import PLAIN_TERMS, BlockLoss, DFlashDrafter, DraftShape
from paceline.train.checkpoint import load_drafter
from tests.toy import Toy, train


class ShiftedDrafter(DFlashDrafter):
    """Predicts one token further a slot, wants the last hidden state, has a weight and a loss of its own."""

    needs_last_hidden = True
    label_shift = 1

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.previous = nn.Parameter(torch.zeros(shape.vocab_size, shape.options["rank"]))

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {"rank": 4} | options

    @classmethod
    def default_gamma(cls, block_size: int) -> float:
        return 1.5

    def loss(self, hidden, head, targets, anchors, features, terms=PLAIN_TERMS) -> BlockLoss:
        assert features.last_hidden is not None and features.last_hidden.abs().sum() > 0
        result = super().loss(hidden, head, targets, anchors, features, terms)
        return result._replace(loss=result.loss + 1e-3 * (self.previous - 1).square().sum())


@pytest.fixture(autouse=True)
def _register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.KINDS, "shifted", ShiftedDrafter)


def test_a_kind_is_a_class(toy: Toy, tmp_path: Path) -> None:
    """Options, default gamma, last hidden state, shifted labels: trained, resumed, validated, loaded and decoded."""
    overrides = ("draft.kind=shifted", "draft.options={rank: 2}", "run.max_steps=12", "eval.validate_every=4")
    report, lines = train(toy.config(tmp_path / "run", *overrides))
    assert report.ending == "finished" and lines[-1]["loss"] < lines[0]["loss"]
    assert report.best_acceptance_length is not None
    assert "gamma: 1.5" in (tmp_path / "run" / "config.yaml").read_text()
    drafter = load_drafter(tmp_path / "run")
    assert isinstance(drafter, ShiftedDrafter) and drafter.shape.options == {"rank": 2}
    assert drafter.num_predicted == drafter.shape.block_size
    assert float(drafter.previous.detach().mean()) > 0  # its own loss pulled it there
    target = CachedTarget.load(str(toy.target), drafter.shape.target_layer_ids)
    prompt = [256, 117, 10, 51, 257, 10, 256, 97, 10]
    plain = plain_decode(target, prompt, 20, ())
    drafted = speculative_decode(target, drafter, prompt, 20, ())
    assert drafted.tokens == plain.tokens
    again, _ = train(toy.config(tmp_path / "run", *overrides))
    assert again.step == 12 and again.ledger["issued"] == 0
