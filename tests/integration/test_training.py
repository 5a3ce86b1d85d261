"""The promises of training: one order, one result, exact continuation, failures that end the run with their cause."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli.train import merge_with_saved
from paceline.control.run_folder import RunFolder
from paceline.errors import CheckpointError, ConfigError, PipelineError
from paceline.models.target import Target
from paceline.train.checkpoint import load_drafter
from tests.toy import Toy, build_toy, train

STEPS = 12
TIMES = ("tok_per_s", "queue", "put_wait_s", "get_wait_s")


def same_training(lines: list[dict]) -> list[dict]:
    """Metrics lines without what depends on the clock."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint: weights and moments."""
    place = run_dir / "checkpoints" / "latest"
    return {f"{file.name}:{k}": v for file in place.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys() and len(first) > 50
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.fixture(scope="module")
def straight(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A run without any interruption, one target thread."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    _, lines = train(toy.config(run_dir, f"run.max_steps={STEPS}"))
    return run_dir, lines


def test_a_run_learns_and_writes_what_it_promises(straight: tuple[Path, list[dict]]) -> None:
    """The loss falls, every step has its line, the last step is saved, and best points to the best validation."""
    run_dir, lines = straight
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["batch"] for line in lines] == [2 * s - 1 for s in range(1, STEPS + 1)]
    assert lines[-1]["loss"] < 0.75 * lines[0]["loss"]
    written = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert written == lines
    fields = {"step", "batch", "loss", "acceptance_length_est", "lr", "grad_norm", "tokens", *TIMES}
    assert all(fields <= line.keys() for line in written)
    checkpoints = run_dir / "checkpoints"
    assert (checkpoints / "latest").resolve().name == f"step-{STEPS:08d}"
    measured = {line["step"]: line["validation_acceptance_length"] for line in lines if line["step"] % 6 == 0}
    best = max(measured, key=lambda step: (measured[step], -step))
    assert (checkpoints / "best").resolve().name == f"step-{best:08d}"
    assert json.loads((run_dir / "report.json").read_text())["ending"] == "finished"


@pytest.mark.parametrize(
    "overrides",
    [
        ("topology.targets=2", "pipeline.queue_depth=1"),
        ("topology.targets=3", "pipeline.queue_depth=4", "pipeline.min_ready=3"),
        ("topology.targets=2", "pipeline.queue_depth=8", "pipeline.queue_gib=1e-9"),
        ("topology.layout=colocated",),
        ("topology.targets=2", "pipeline.feature_cache_gib=0.1"),
    ],
    ids=" ".join,
)
def test_workers_and_queues_do_not_change_the_result(
    toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Losses and weights are the same bits for any number of targets, queue size, layout and feature cache."""
    run_dir, lines = straight
    _, other = train(toy.config(tmp_path / "run", f"run.max_steps={STEPS}", *overrides))
    assert same_training(other) == same_training(lines)
    assert_same_bits(run_dir, tmp_path / "run")


def test_another_seed_is_another_training(toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path) -> None:
    """The seed changes order, anchors and weights."""
    _, other = train(toy.config(tmp_path / "run", "run.max_steps=2", "run.seed=1"))
    assert other[0]["loss"] != straight[1][0]["loss"]


@pytest.mark.parametrize("stops", [[1], [5], [3, 4, 9]], ids=str)
def test_a_stopped_and_resumed_run_is_the_straight_run(
    toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path, stops: list[int]
) -> None:
    """After SIGINT at any step and a new start, losses, weights and moments are those of the straight run."""
    run_dir = tmp_path / "run"
    config = toy.config(run_dir, f"run.max_steps={STEPS}")
    for stop in [*stops, None]:
        report, _ = train(config, lambda step, stop=stop: os.kill(os.getpid(), signal.SIGINT) if step == stop else None)
        assert report.ending == ("finished" if stop is None else "SIGINT")
        assert report.step == (STEPS if stop is None else stop)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert same_training(lines) == same_training(straight[1])
    assert_same_bits(straight[0], run_dir)


def test_a_resumed_run_drops_metrics_past_its_checkpoint(toy: Toy, tmp_path: Path) -> None:
    """Lines of steps that were lost with a killed process are cut, also a last one that is half-written."""
    config = toy.config(tmp_path, "run.max_steps=7", "eval.validate_every=100")
    train(config)
    metrics = tmp_path / "metrics.jsonl"
    (tmp_path / "checkpoints" / "latest").unlink()
    for path in (tmp_path / "checkpoints" / "step-00000007").iterdir():
        path.unlink()
    with open(metrics, "a") as file:
        file.write('{"step": 8, "lo')
    train(config)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 8))


def test_a_failing_target_ends_the_run_with_its_own_traceback(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target thread's exception reaches the caller within seconds, with role and batch, after a checkpoint."""
    original = Target.features

    def failing(self: Target, tokens, cache=None):
        if tokens.number == 7:
            raise RuntimeError("toy failure 7")
        return original(self, tokens, cache)

    monkeypatch.setattr(Target, "features", failing)
    started = time.monotonic()
    with pytest.raises(PipelineError, match="toy failure 7") as caught:
        train(toy.config(tmp_path, "topology.targets=2", "pipeline.queue_depth=2"))
    assert time.monotonic() - started < 10
    assert caught.value.batch == 7 and caught.value.role.startswith("target-")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (tmp_path / "checkpoints" / "latest" / "model.safetensors").is_file()


def test_a_failing_drafter_releases_the_targets(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter's exception ends the run although target threads are blocked on a full queue."""
    from paceline.train.step import TrainStep

    def failing(self: TrainStep, features):
        raise RuntimeError("toy failure in trainer")

    monkeypatch.setattr(TrainStep, "accumulate", failing)
    with pytest.raises(PipelineError, match="drafter-0 failed on batch 0.*toy failure in trainer"):
        train(toy.config(tmp_path, "topology.targets=3", "pipeline.queue_depth=1"))


def test_a_loss_that_is_not_finite_ends_the_run(toy: Toy, tmp_path: Path) -> None:
    """A diverging run stops with the batch and its rows named instead of logging NaN."""
    with pytest.raises(PipelineError, match=r"the loss of batch \d+ is (nan|inf)"):
        train(toy.config(tmp_path, "optim.lr=1e30", "optim.clip=1e30"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.mask_token_id=268", r"draft\.mask_token_id: the run was started with 267, now 268"),
        ("target.layer_ids=[1]", r"target\.layer_ids: the run was started with \[1, 2\], now \[1\]"),
        ("optim.lr=1e-3", r"optim\.lr: the run was started with 0\.003, now 0\.001"),
    ],
)
def test_a_run_folder_refuses_other_settings(toy: Toy, straight: tuple, override: str, message: str) -> None:
    """A changed setting that would change the training is refused with the key and both values."""
    wanted = toy.config(straight[0], f"run.max_steps={STEPS}", override)
    with pytest.raises(ConfigError, match=message):
        merge_with_saved(RunFolder(straight[0]).read_config(), wanted)


def test_what_may_change_is_taken_over(toy: Toy, straight: tuple) -> None:
    """Workers, queues and checkpoint settings of a resumed run come from the new file."""
    wanted = toy.config(straight[0], f"run.max_steps={STEPS}", "topology.targets=3", "checkpoint.keep_last=1")
    merged = merge_with_saved(RunFolder(straight[0]).read_config(), wanted)
    assert (merged.topology.targets, merged.checkpoint.keep_last) == (3, 1)
    assert merged.draft.mask_token_id == 267


def test_other_data_behind_the_same_path_is_refused(toy: Toy, tmp_path: Path) -> None:
    """Resuming with another data set's contents names both fingerprints."""
    config = toy.config(tmp_path / "run", "run.max_steps=2")
    train(config)
    other = build_toy(tmp_path / "other")
    lines = other.conversations.read_text().splitlines(keepends=True)
    other.conversations.write_text("".join(lines[:-5]))
    from paceline.data.prepare import PrepareSettings, prepare

    prepare([other.conversations], other.data, PrepareSettings(tokenizer=str(other.target), max_length=128))
    changed = toy.config(tmp_path / "run", "run.max_steps=2", f"data.path={other.data}")
    with pytest.raises(CheckpointError, match=r"other contents of data\.path: data_fingerprint"):
        train(changed)


def test_a_second_trainer_is_kept_out(toy: Toy, tmp_path: Path) -> None:
    """A run folder that is being trained refuses a second process and names the first."""
    with RunFolder(tmp_path).lock(), pytest.raises(CheckpointError, match=str(os.getpid())):
        train(toy.config(tmp_path))


def test_the_best_drafter_of_a_run_loads(straight: tuple) -> None:
    """A run folder gives back its best drafter with the trained mask token and taps."""
    drafter = load_drafter(straight[0])
    assert drafter.shape.mask_token_id == 267 and drafter.shape.target_layer_ids == (1, 2)


def test_a_step_with_nothing_to_learn_is_no_step(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case T04: micro-batches without an anchor are counted as skipped, and no step number is used up by them."""
    from paceline.data.packing import PackedBatches

    original = PackedBatches.batch

    def bare(self: PackedBatches, number: int):
        tokens = original(self, number)
        if number in (4, 5):
            tokens.loss_mask[:] = False
        return tokens

    monkeypatch.setattr(PackedBatches, "batch", bare)
    report, lines = train(toy.config(tmp_path))
    assert report.skipped_batches == 2 and report.step == report.total_steps - 1
    assert [line["step"] for line in lines] == list(range(1, report.total_steps))
    assert [line["batch"] for line in lines][:3] == [1, 3, 7]


def test_a_time_limit_saves_and_ends(toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path) -> None:
    """A run past `run.max_hours` saves and ends like a stopped one, and goes on exactly without the limit."""
    config = toy.config(tmp_path / "run", f"run.max_steps={STEPS}")
    report, lines = train(toy.config(tmp_path / "run", f"run.max_steps={STEPS}", "run.max_hours=1e-9"))
    assert (report.ending, report.step, lines) == ("max_hours", 0, [])
    assert train(config)[0].ending == "finished"
    assert_same_bits(straight[0], tmp_path / "run")
