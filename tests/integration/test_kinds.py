"""Another drafter kind needs a class and nothing else: the whole path, with every seam used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import Loss, Optim
from paceline.eval.decode import CachedTarget, plain_decode, speculative_decode
from paceline.kernels.linear_mixed_loss import Mix
from paceline.models import kinds
from paceline.models.draft import PLAIN_TERMS, BlockLoss, DFlashDrafter, DraftShape
from paceline.records import TokenBatch
from paceline.train.checkpoint import load_drafter
from paceline.train.step import TrainStep
from tests import tiny
from tests.integration.test_training import assert_same_bits
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


BUILT_IN = ("dflash", "dflash2", "dspark")


def overrides_of(kind: str) -> tuple[str, ...]:
    return f"draft.kind={kind}", f"draft.options={json.dumps(tiny.OPTIONS[kind])}"


@pytest.mark.parametrize("kind", BUILT_IN[1:])
def test_runs_of_a_kind_resume_exactly(kind: str, toy: Toy, tmp_path: Path) -> None:
    """A run that ended between two steps goes on to the weights, moments and losses of one that did not."""
    overrides = *overrides_of(kind), "run.max_steps=8", "checkpoint.every_steps=4"
    straight, lines = train(toy.config(tmp_path / "straight", *overrides))
    assert lines[-1]["loss"] < lines[0]["loss"] and straight.best_acceptance_length is not None
    parts = {"dflash2": {"selector_loss", "candidate_recall"}, "dspark": {"overlap", "confidence_loss"}}[kind]
    assert parts <= lines[-1].keys() and all(lines[-1][name] > 0 for name in parts)

    def stop(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(toy.config(tmp_path / "cut", *overrides, "checkpoint.every_steps=3"), stop)
    train(toy.config(tmp_path / "cut", *overrides))
    assert_same_bits(tmp_path / "straight", tmp_path / "cut")
    drafter = load_drafter(tmp_path / "cut")
    assert type(drafter) is kinds.drafter_class(kind) and drafter.shape.options == tiny.OPTIONS[kind]


@pytest.mark.parametrize(
    ("kind", "loss"), [*((kind, {}) for kind in BUILT_IN), ("dflash2", {"kind": "dpace", "kl": 0.5})]
)
def test_what_is_learnt_by_heart_is_accepted_whole(kind: str, loss: dict[str, Any], tmp_path: Path) -> None:
    """Trained on one answer of the target until it is known, every block of it is accepted to its last token."""
    shape = tiny.shape_of_kind(kind)
    folder = tmp_path / "target"
    model = tiny.causal_lm("llama")
    model.lm_head.weight.data.mul_(8.0)  # sure of what it says, as targets are of text that they know
    tiny.save(model, folder)
    target = tiny.target("llama", folder, layer_ids=shape.target_layer_ids, needs_last_hidden=True)
    cached = CachedTarget.load(str(folder), shape.target_layer_ids)
    prompt = [7, 1, 9, 250]
    answer = plain_decode(cached, prompt, 41, ()).tokens
    ids = torch.tensor([*prompt, *answer])
    tokens = TokenBatch.pack(0, [(0, ids, torch.arange(len(ids)) >= len(prompt))], 48)
    drafter = kinds.drafter_class(kind)(shape)
    drafter.initialise(0, target.embed, target.head)
    step = TrainStep(
        drafter, target.embed, target.head, Optim(lr=1e-2), num_anchors=40, loss=Loss(gamma=50.0, **loss),
        mix=Mix(drafter.default_mix.ce, loss.get("kl", 0.0), drafter.default_mix.l1), seed=0, total_steps=300,
        dtype=torch.float32,
    )  # fmt: skip
    features = target.features(tokens)
    for number in range(300):
        step.accumulate(features)
        step.update(number).read()
    drafted = speculative_decode(cached, drafter.requires_grad_(False), prompt, 41, ())
    assert drafted.tokens == answer
    assert drafted.acceptance.length == drafter.num_predicted + 1, drafted.num_accepted_tokens
