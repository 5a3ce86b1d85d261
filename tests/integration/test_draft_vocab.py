"""`draft.vocab`: trained, resumed, loaded, decoded without loss, and refused where it cannot go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli.train import resolve_config
from paceline.config import load_config
from paceline.data.dataset import Dataset
from paceline.errors import ConfigError, ModelError
from paceline.eval.decode import CachedTarget, plain_decode, speculative_decode
from paceline.export.zlab import export_zlab
from paceline.models.draft import DFlashDrafter
from paceline.plan.memory import memory_plan
from paceline.train.checkpoint import load_drafter
from tests import tiny
from tests.toy import Toy, train


def vocab_of(toy: Toy, value: str) -> list[int]:
    resolved, _ = resolve_config(toy.config(Path("run"), f"draft.vocab={value}"))
    assert resolved.draft_token_ids is not None
    assert resolved.draft.draft_vocab_size == len(resolved.draft_token_ids)
    return resolved.draft_token_ids.tolist()


def test_observed_is_what_the_training_rows_hold(toy: Toy) -> None:
    """Every token of a training row, prompts included, and the end token; nothing that held-out rows alone have."""
    dataset = Dataset.open(toy.data)
    train_rows, validation_rows = dataset.split(0.1)
    seen = {int(token) for row in train_rows for token in dataset.row(int(row))[0]}
    assert vocab_of(toy, "observed") == sorted(seen | {257})
    assert len(validation_rows) > 0


def test_a_number_takes_the_most_frequent(toy: Toy) -> None:
    """Supervised tokens by count, then context by count, then the lowest ids; the end token always."""
    dataset = Dataset.open(toy.data)
    train_rows, _ = dataset.split(0.1)
    supervised, context = [0] * tiny.VOCAB, [0] * tiny.VOCAB
    for row in train_rows:
        for token, counts in zip(*(part.tolist() for part in dataset.row(int(row))), strict=True):
            context[token] += 1
            supervised[token] += counts
    ranked = sorted(range(tiny.VOCAB), key=lambda t: (-(10**9 if t == 257 else supervised[t]), -context[t], t))
    for number in (2, 9, 40, tiny.VOCAB - 1):
        assert vocab_of(toy, str(number)) == sorted(ranked[:number])


@pytest.mark.parametrize("value", ["1", "272", "100000"])
def test_a_number_that_makes_no_sense_is_refused(toy: Toy, value: str) -> None:
    """Not more than the end tokens, or not fewer than the target has: the message names both limits."""
    with pytest.raises(ConfigError, match=rf"draft.vocab={value}: more than the 1 end tokens and fewer than .* 272"):
        vocab_of(toy, value)
    for wrong in ("some", "0", "-3", "1.5"):
        with pytest.raises(ConfigError, match="draft.vocab"):
            load_config(None, ["target.path=t", "data.path=d", f"draft.vocab={wrong}"])


def test_a_kind_that_needs_the_whole_vocabulary_refuses(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some drafters score against the target's whole distribution; they say so before anything is loaded."""
    monkeypatch.setattr(DFlashDrafter, "supports_draft_vocab", False)
    with pytest.raises(ConfigError, match="draft.kind=dflash drafts from the whole vocabulary"):
        vocab_of(toy, "observed")


def test_a_short_head_takes_less_memory(toy: Toy) -> None:
    """The plan counts the drafter's rows of the head, not the target's."""
    whole, shape = resolve_config(toy.config(Path("run"), "draft.dtype=bfloat16"))
    short, _ = resolve_config(toy.config(Path("run"), "draft.dtype=bfloat16", "draft.vocab=20"))
    saved = memory_plan(whole, shape).shared_bytes - memory_plan(short, shape).shared_bytes
    assert saved == (tiny.VOCAB - 20) * 32 * 2


@pytest.mark.parametrize(("value", "loss"), [("observed", ()), ("24", ("loss.kl=0.5", "loss.l1=0.5"))])
def test_the_whole_path_with_a_short_head(toy: Toy, tmp_path: Path, value: str, loss: tuple[str, ...]) -> None:
    """It learns, goes on with the same bits after a stop, loads with its tokens, and decodes without loss."""
    overrides = (f"draft.vocab={value}", *loss, "run.max_steps=12", "checkpoint.every_steps=100")
    report, lines = train(toy.config(tmp_path / "straight", *overrides))
    assert report.ending == "finished" and lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1].get("validation_acceptance_length") or report.best_acceptance_length

    def stop(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(toy.config(tmp_path / "stopped", *overrides, "checkpoint.every_steps=5"), stop)
    train(toy.config(tmp_path / "stopped", *overrides, "checkpoint.every_steps=5"))
    one, other = (
        load_file(tmp_path / name / "checkpoints" / "latest" / "model.safetensors") for name in ("straight", "stopped")
    )
    assert [key for key in one if not torch.equal(one[key], other[key])] == []

    drafter = load_drafter(tmp_path / "straight")
    assert drafter.draft_token_ids() is not None
    target = CachedTarget.load(str(toy.target), drafter.shape.target_layer_ids)
    prompt = [256, 117, 10, 51, 257, 10, 256, 97, 10]
    plain = plain_decode(target, prompt, 30, ())
    drafted = speculative_decode(target, drafter, prompt, 30, ())
    assert drafted.tokens == plain.tokens
    with pytest.raises(ModelError, match=r"z-lab layout has no place for.*speculators.*draft\.vocab=full"):
        export_zlab(drafter, tmp_path / "export")
    assert not (tmp_path / "export").exists()
