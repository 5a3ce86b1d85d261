"""Results that are read one update late, as on a GPU: the same run, also when it is stopped, saved or goes wrong."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import PipelineError
from paceline.records import FeatureBatch, StepSums
from paceline.train import checkpoint
from paceline.train.step import TrainStep
from tests.integration.test_training import assert_same_bits, same_training
from tests.toy import Toy, train


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU results are there at once; the loop is made to leave them for a while."""
    original = TrainStep.__init__

    def init(self: TrainStep, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.depth = 1

    monkeypatch.setattr(TrainStep, "__init__", init)


@pytest.fixture(scope="module")
def straight(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return run_dir, train(toy.config(run_dir, "run.max_steps=13"))[1]


def test_late_results_change_nothing(toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path) -> None:
    """Metrics, weights and moments are those of the run whose results are read at once, every step has its line."""
    report, lines = train(toy.config(tmp_path, "run.max_steps=13"))
    assert report.step == 13 and [line["step"] for line in lines] == list(range(1, 14))
    assert same_training(lines) == same_training(straight[1])
    assert_same_bits(straight[0], tmp_path)


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_a_stop_waits_for_what_is_under_way(
    toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path, stop: int
) -> None:
    """A stop saves the last update that was made, has a line for it, and a new start goes on exactly there."""
    config = toy.config(tmp_path, "run.max_steps=13")
    report, _ = train(config, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == stop else None)
    assert report.ending == "SIGINT" and stop <= report.step <= stop + 1
    metrics = tmp_path / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, report.step + 1))
    train(config)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert same_training(lines) == same_training(straight[1])
    assert_same_bits(straight[0], tmp_path)


def test_a_bad_update_is_taken_back(
    toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that is found bad after the next one was launched leaves the weights of the last good one, saved under
    its own number; the run then goes on as if nothing had happened."""
    original = TrainStep.update

    def poisoned(self: TrainStep, step: int) -> Any:
        if step == 7:
            next(iter(self.optimizer.gradients().values())).fill_(float("nan"))
        return original(self, step)

    config = toy.config(tmp_path, "run.max_steps=13")
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "update", poisoned)
        with pytest.raises(PipelineError, match="the gradient norm nan at step 8, batches up to 15"):
            train(config)
    place = checkpoint.newest(tmp_path / "checkpoints")
    assert place is not None and checkpoint.load_state(place).step == 7
    metrics = tmp_path / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 8))
    assert all(weight.isfinite().all() for weight in checkpoint.load_drafter(tmp_path).state_dict().values())
    torch.manual_seed(0)
    train(config)
    assert_same_bits(straight[0], tmp_path)


def test_empty_batches_that_are_taken_back_are_counted_once(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that were skipped after an update which is taken back are skipped again, and counted once."""
    update, accumulate = TrainStep.update, TrainStep.accumulate
    poison = [True]

    def poisoned(self: TrainStep, step: int) -> Any:
        if step == 7 and poison[0]:
            next(iter(self.optimizer.gradients().values())).fill_(float("nan"))
        return update(self, step)

    def empty(self: TrainStep, features: FeatureBatch) -> StepSums:
        if 16 <= features.tokens.number < 22:
            return StepSums(tokens=features.tokens.num_tokens, batches=1)
        return accumulate(self, features)

    monkeypatch.setattr(TrainStep, "update", poisoned)
    monkeypatch.setattr(TrainStep, "accumulate", empty)
    config = toy.config(tmp_path, "run.max_steps=13")
    with pytest.raises(PipelineError, match="the gradient norm nan"):
        train(config)
    poison[0] = False
    report, lines = train(config)
    assert report.skipped_batches == 6
    ledger = report.ledger  # their time is in a line, and so are they
    assert sum(line["batches"] for line in lines) == ledger["trained"] + ledger["skipped"]
