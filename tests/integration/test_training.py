"""The promises of training: one order, one result, exact continuation, failures that end the run with their cause."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli.train import allowed_keys, merge_with_saved, run_training
from paceline.config import dump_config
from paceline.control.run_folder import RunFolder
from paceline.data.prepare import PrepareSettings, prepare
from paceline.errors import CheckpointError, ConfigError, DataError, ModelError, PipelineError
from paceline.models.target import Target
from paceline.records import StepSums
from paceline.train.checkpoint import load_drafter, point
from tests.toy import Toy, Watch, build_toy, train

STEPS = 12
TIMES = ("tok_per_s", "queue", "put_wait_s", "get_wait_s", "ready_wait_s", "seconds")


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
    fields = {"step", "batch", "loss", "acceptance_length_est", "lr", "grad_norm", "tokens", "batches", *TIMES}
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


def test_stratified_anchors_are_another_training(toy: Toy, tmp_path: Path) -> None:
    """`anchors.stratify` reaches the step: the same batches, other anchors."""
    few = ("run.max_steps=2", "anchors.per_token=0.05")
    _, plain = train(toy.config(tmp_path / "plain", *few))
    _, stratified = train(toy.config(tmp_path / "stratified", *few, "anchors.stratify=true"))
    assert [line["tokens"] for line in stratified] == [line["tokens"] for line in plain]
    assert stratified[0]["loss"] != plain[0]["loss"]


@pytest.mark.parametrize("recipe", [("optim.kind=muon",), ("draft.feature_noise=0.2",)], ids=" ".join)
def test_recipes_reach_the_step_and_resume_exactly(
    toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path, recipe: tuple[str, ...]
) -> None:
    """Another training than the default one, that learns, and is the same bits when it is stopped and goes on."""
    overrides = "run.max_steps=10", "checkpoint.every_steps=5", *recipe
    _, lines = train(toy.config(tmp_path / "straight", *overrides))
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[9]["loss"] != straight[1][9]["loss"]

    def stop(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(toy.config(tmp_path / "cut", *overrides), stop)
    train(toy.config(tmp_path / "cut", *overrides))
    assert_same_bits(tmp_path / "straight", tmp_path / "cut")


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
    """A diverging run stops with the batch and its rows named instead of logging NaN, and saves none of it."""
    with pytest.raises(PipelineError, match=r"the loss of batch \d+ is not finite; .*the weights have diverged"):
        train(toy.config(tmp_path, "optim.lr=1e30", "optim.clip=1e30"))
    assert not (tmp_path / "checkpoints").exists()
    assert all(json.loads(line)["loss"] < 1e30 for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.mask_token_id=268", r"draft\.mask_token_id: the run was started with 267, now 268"),
        ("target.layer_ids=[1]", r"target\.layer_ids: the run was started with \[1, 2\], now \[1\]"),
        ("optim.lr=1e-3", r"optim\.lr: the run was started with 0\.003, now 0\.001"),
        ("anchors.stratify=true", r"anchors\.stratify: the run was started with False, now True"),
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


def test_a_change_that_is_allowed_is_taken_over(toy: Toy, tmp_path: Path) -> None:
    """With the key named, a run goes on with another rate, schedule or data set, and says so in its events."""
    train(toy.config(tmp_path / "run", "run.max_steps=4"))
    allowed = allowed_keys(["optim.lr", "run.max_steps", "data.path"])
    other = tmp_path / "data"
    prepare([toy.conversations] * 2, other, PrepareSettings(tokenizer=str(toy.target), max_length=128))
    wanted = toy.config(tmp_path / "run", "run.max_steps=7", "optim.lr=1e-3", f"data.path={other}")
    config = merge_with_saved(RunFolder(tmp_path / "run").read_config(), wanted, allowed)
    assert (config.optim.lr, config.run.max_steps, config.data.path) == (1e-3, 7, str(other))
    with pytest.raises(CheckpointError, match="--allow-change data.path goes on"):
        run_training(config, Watch())
    watch = Watch()
    assert run_training(config, watch, allowed=allowed).step == 7
    assert [line["step"] for line in watch.lines] == [5, 6, 7] and watch.lines[-1]["lr"] < 1e-3
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["allowed_to_change"] for e in events if e["event"] == "resumed"] == [sorted(allowed)]


def test_what_is_allowed_to_change_exists() -> None:
    """A key that there is not is refused with the nearest."""
    with pytest.raises(ConfigError, match=r"--allow-change optim.rate: unknown key"):
        allowed_keys(["optim.rate"])
    with pytest.raises(ConfigError, match=r"did you mean data\.path\?"):
        allowed_keys(["data.paht"])


def test_a_tap_that_is_not_the_targets_own_state_is_refused(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is trained, with the layer and both tolerances."""
    original = Target.document_features

    def shifted(self: Target, input_ids):
        return original(self, input_ids).roll(1, dims=-1)

    monkeypatch.setattr(Target, "document_features", shifted)
    with pytest.raises(ModelError, match=r"the tap behind layer 1 is .* off the target's own hidden_states\[2\]"):
        train(toy.config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_taps_that_are_delivered_in_bfloat16_are_the_targets_own(toy: Toy, tmp_path: Path) -> None:
    """As where the drafter computes in it: rounding is no difference."""
    assert train(toy.config(tmp_path, "draft.dtype=bfloat16", "run.max_steps=1"))[0].step == 1


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


def test_the_last_step_takes_the_batches_that_remain(toy: Toy, tmp_path: Path) -> None:
    """With a number of batches that no step size divides, the last step is shorter and none is lost."""
    report, lines = train(toy.config(tmp_path, "optim.tokens_per_step=640", "topology.targets=2"))
    number_of_batches = lines[-1]["batch"] + 1
    assert number_of_batches % 5 != 0
    assert report.ledger == {
        "issued": number_of_batches, "trained": number_of_batches, "in_flight": 0, "skipped": 0, "retried": 0
    }  # fmt: skip
    assert report.step == report.total_steps == -(-number_of_batches // 5)


@pytest.mark.parametrize("fails", [False, True])
def test_no_target_thread_outlives_a_run(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """After a run has ended, well or badly, its target threads are gone."""
    from paceline.train.step import TrainStep

    if fails:
        monkeypatch.setattr(TrainStep, "update", lambda *_: 1 / 0)
    try:
        train(toy.config(tmp_path, "topology.targets=3", "pipeline.queue_depth=1", "run.max_steps=2"))
    except PipelineError as error:
        assert "ZeroDivisionError" in str(error)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("target-")] == []


def test_a_target_thread_that_exits_ends_the_run(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a target thread, SystemExit of a library included, is a failure and no hang."""

    def leave(self: Target, tokens, cache=None):
        raise SystemExit(3)

    monkeypatch.setattr(Target, "features", leave)
    with pytest.raises(PipelineError, match="target-0 ended: SystemExit: 3"):
        train(toy.config(tmp_path))


def test_a_failing_validation_loses_no_step(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure after the update ends the run under the drafter's name; the step is saved and keeps its line."""
    from paceline.eval.validation import Validation

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "measure", lambda *_: 1 / 0)
        with pytest.raises(PipelineError, match="drafter-0 failed on batch 11: ZeroDivisionError"):
            train(toy.config(tmp_path, "run.max_steps=8"))
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000006"
    train(toy.config(tmp_path, "run.max_steps=8"))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))


def stop_at(step: int):
    """For `train`: SIGINT after this step."""
    return lambda now: os.kill(os.getpid(), signal.SIGINT) if now == step else None


def poison(monkeypatch: pytest.MonkeyPatch, what: str, *numbers: int) -> None:
    """Make features, loss or gradient of these batches NaN."""
    from paceline.train.step import TrainStep

    accumulate, features_of = TrainStep._accumulate, Target.features

    def accumulated(self: TrainStep, features):
        sums = accumulate(self, features)
        if features.tokens.number in numbers and what == "gradient":
            next(self.drafter.parameters()).grad[0, 0] = float("nan")
        if features.tokens.number in numbers and what == "loss":
            self._sums[0] = float("inf")
        return sums

    def featured(self: Target, tokens, cache=None):
        features = features_of(self, tokens, cache)
        if tokens.number in numbers and what == "features":
            features.context_feature[0, 0] = float("nan")
        return features

    monkeypatch.setattr(TrainStep, "_accumulate", accumulated)
    monkeypatch.setattr(Target, "features", featured)


@pytest.mark.parametrize("what", ["features", "loss", "gradient"])
def test_what_is_not_finite_leaves_the_weights_alone(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Without a budget it ends the run, with its batch and rows, and the saved weights are those before it."""
    poison(monkeypatch, what, 8)
    with pytest.raises(PipelineError, match=f"the {what} of batch 8 is not finite; data set rows"):
        train(toy.config(tmp_path, "run.max_bad_batches=0"))
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000004"
    assert all(torch.isfinite(tensor).all() for tensor in tensors(tmp_path).values())


@pytest.mark.parametrize("what", ["features", "loss", "gradient"])
@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_a_bad_batch_is_left_out_and_named(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, layout: str
) -> None:
    """Its step is made of the others, the ledger counts it, and its lines are on record; so again after a resume."""
    poison(monkeypatch, what, 8, 12, 13)  # of the steps 5 and 7, and 7 has no other
    config = toy.config(tmp_path / "straight", f"topology.layout={layout}", "topology.targets=1", "run.max_steps=9")
    report, lines = train(config)
    assert [(line["step"], line["batch"]) for line in lines] == list(enumerate((1, 3, 5, 7, 9, 11, 15, 17), start=1))
    assert report.skipped_batches == 3
    ledger = report.ledger
    assert (ledger["trained"], ledger["skipped"]) == (15, 3) and ledger["retried"] >= 4
    assert ledger["issued"] == ledger["trained"] + ledger["in_flight"] + ledger["skipped"]
    bad = [json.loads(line) for line in (tmp_path / "straight" / "bad_batches.jsonl").read_text().splitlines()]
    assert [(line["batch"], line["what"]) for line in bad] == [(8, what), (12, what), (13, what)]
    assert all(source.startswith(f"{toy.conversations}:") for source in bad[0]["sources"])

    stopped = toy.config(tmp_path / "resumed", f"topology.layout={layout}", "topology.targets=1", "run.max_steps=9")
    train(stopped, lambda step: os.kill(os.getpid(), signal.SIGINT) if step in (4, 5, 6) else None)
    while train(stopped)[0].ending != "finished":
        pass
    assert_same_bits(tmp_path / "straight", tmp_path / "resumed")


def test_a_passing_failure_changes_nothing(
    toy: Toy, straight: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that fails once or twice on a batch, or delivers a part of it, makes it again; nothing changes."""
    original, failures = Target.features, {3: 2, 7: 1, 10: 2}

    def failing(self: Target, tokens, cache=None):
        features = original(self, tokens, cache)
        if failures.get(tokens.number, 0):
            failures[tokens.number] -= 1
            if tokens.number == 10:
                return replace(features, context_feature=features.context_feature[:-1])
            raise RuntimeError("a hiccup")
        return features

    monkeypatch.setattr(Target, "features", failing)
    report, lines = train(toy.config(tmp_path, f"run.max_steps={STEPS}", "topology.targets=2"))
    assert report.ledger["retried"] == 5
    assert same_training(lines) == same_training(straight[1])
    assert_same_bits(straight[0], tmp_path)


def test_features_of_another_length_end_the_run(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are neither padded nor cut, and both lengths are named."""
    original = Target.features

    def short(self: Target, tokens, cache=None):
        features = original(self, tokens, cache)
        return replace(features, context_feature=features.context_feature[:6])

    monkeypatch.setattr(Target, "features", short)
    with pytest.raises(PipelineError, match="features of batch 0, 6 tokens of 128, where batch 0 was wanted"):
        train(toy.config(tmp_path))


def test_memory_that_runs_out_is_explained(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the memory plan and the two settings that help, and nothing is tried again."""
    calls = []

    def greedy(self: Target, tokens, cache=None):
        calls.append(tokens.number)
        return torch.empty(2**60)

    monkeypatch.setattr(Target, "features", greedy)
    with pytest.raises(PipelineError) as caught:
        train(toy.config(tmp_path, "topology.targets=1"))
    assert calls == [0]
    for words in ("out of memory: the plan is", "drafter", "draft.recompute=true", "pipeline.tokens_per_batch"):
        assert words in str(caught.value)


def test_nothing_to_learn_at_all_is_an_error(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that made no step has not finished well."""
    from paceline.train.step import TrainStep

    monkeypatch.setattr(TrainStep, "accumulate", lambda *_: StepSums(batches=1))
    with pytest.raises(DataError, match="nothing was to be learnt from any"):
        train(toy.config(tmp_path))


def test_features_that_are_not_finite_are_the_targets_fault(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: the drafter's last good step is saved, and nobody is told to lower its rate."""
    poison(monkeypatch, "features", *range(8, 40))
    with pytest.raises(PipelineError, match="the target makes them, not the drafter"):
        train(toy.config(tmp_path, "checkpoint.every_steps=100"))
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000004"


def test_what_was_not_finite_by_chance_is_made_again(
    toy: Toy, straight: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN that does not come back costs nothing but time; a target that fails meanwhile is asked again."""
    original, calls = Target.features, list[int]()

    def once(self: Target, tokens, cache=None):
        calls.append(tokens.number)
        if tokens.number == 9 and calls.count(9) == 2:
            raise RuntimeError("a hiccup while it is made again")
        features = original(self, tokens, cache)
        if tokens.number == 8 and calls.count(8) == 1:
            features.context_feature[0, 0] = float("nan")
        return features

    monkeypatch.setattr(Target, "features", once)
    report, lines = train(toy.config(tmp_path, f"run.max_steps={STEPS}", "topology.targets=1"))
    assert same_training(lines) == same_training(straight[1]) and report.skipped_batches == 0
    assert report.tokens == sum(line["tokens"] for line in lines)
    assert_same_bits(straight[0], tmp_path)


def test_checkpoints_that_are_gone_are_no_fresh_start(toy: Toy, tmp_path: Path) -> None:
    """As where a disk is not mounted: the run is refused, and its lines stay."""
    train(toy.config(tmp_path / "run", "run.max_steps=6"))
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="has saved checkpoints, and .* holds none; bring them back"):
        train(toy.config(tmp_path / "run", "run.max_steps=6"))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_copy_that_has_followed_links_goes_on(toy: Toy, straight: tuple, tmp_path: Path) -> None:
    """`latest` and `best` are folders in it; they become links again."""
    train(toy.config(tmp_path / "run", f"run.max_steps={STEPS}"), stop_at(6))
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False, ignore=shutil.ignore_patterns("profile"))
    train(toy.config(tmp_path / "copy", f"run.max_steps={STEPS}"))
    assert all((tmp_path / "copy" / "checkpoints" / name).is_symlink() for name in ("latest", "best"))
    assert_same_bits(straight[0], tmp_path / "copy")


def test_a_measurement_that_was_cut_short_is_made_up_for(
    toy: Toy, straight: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run measures first: lines and the best drafter are those of a run that nobody stopped."""
    from paceline.eval.validation import Validation

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "measure", lambda self, drafter, should_stop: None)
        train(toy.config(tmp_path, f"run.max_steps={STEPS}"), stop_at(6))
    measure, seen = Validation.measure, list[int]()

    def looked_at(self: Validation, *arguments):
        seen.append(len((tmp_path / "metrics.jsonl").read_text().splitlines()))  # a kill now must lose none
        return measure(self, *arguments)

    monkeypatch.setattr(Validation, "measure", looked_at)
    train(toy.config(tmp_path, f"run.max_steps={STEPS}"))
    assert seen[0] == 6
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert same_training(lines) == same_training(straight[1])
    assert_same_bits(straight[0], tmp_path)
    best = [(place / "checkpoints" / "best").resolve().name for place in (straight[0], tmp_path)]
    assert best[0] == best[1]


def test_a_split_run_whose_target_hangs_is_ended(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's looks at the queue are no movement; stage and thread are named, and stacks are there."""
    from paceline.control import watchdog

    hangs, original = threading.Event(), Target.features

    def hang(self: Target, tokens, cache=None):
        if tokens.number == 6:
            hangs.wait(60)
        return original(self, tokens, cache)

    monkeypatch.setattr(Target, "features", hang)
    monkeypatch.setattr(watchdog, "end_process", lambda text: hangs.set())
    train(toy.config(tmp_path, "run.stall_s=0.5", "topology.targets=1", "run.max_steps=6"))
    assert hangs.is_set()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (stalled,) = [event for event in events if event["event"] == "stalled"]
    assert "target-0" in stalled["reason"] and "get_wait" in stalled["reason"]
    assert "hang" in next((tmp_path / "profile").glob("stall-*.txt")).read_text()


def test_a_stop_is_obeyed_while_measuring_and_while_waiting(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal during validation ends it between rows; one while the queue is empty ends the wait."""
    from paceline.data.dataset import Dataset

    original, asked = Dataset.row, []

    def row(self: Dataset, index: int):
        if threading.current_thread() is threading.main_thread():  # only validation reads rows there
            asked.append(index)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "row", row)
        report, lines = train(toy.config(tmp_path / "one", "data.validation=0.3"))
    assert (report.ending, report.step, len(asked)) == ("SIGTERM", 6, 1)
    assert "validation_acceptance_length" not in lines[-1]

    features, release = Target.features, threading.Event()

    def stuck(self: Target, tokens, cache=None):
        if tokens.number == 6:
            os.kill(os.getpid(), signal.SIGINT)
            release.wait(20)
        return features(self, tokens, cache)

    monkeypatch.setattr(Target, "features", stuck)
    threading.Timer(3.0, release.set).start()
    started = time.monotonic()
    report, _ = train(toy.config(tmp_path / "two"))
    assert report.ending == "SIGINT" and report.step <= 3 and time.monotonic() - started < 15


def test_a_lost_best_pointer_comes_back(toy: Toy, straight: tuple[Path, list[dict]], tmp_path: Path) -> None:
    """A process that died between saving the best checkpoint and pointing to it has lost nothing."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight[0], run_dir, symlinks=True)
    best = (run_dir / "checkpoints" / "best").resolve()
    (run_dir / "checkpoints" / "best").unlink()
    train(toy.config(run_dir, f"run.max_steps={STEPS}"))
    assert (run_dir / "checkpoints" / "best").resolve() == best


def test_a_run_gives_its_best_drafter_and_not_its_newest(straight: tuple, tmp_path: Path) -> None:
    """`load_drafter` follows best, and takes the newest only when best is damaged."""
    run_dir = tmp_path / "run"
    shutil.copytree(straight[0], run_dir, symlinks=True)
    steps = sorted((run_dir / "checkpoints").glob("step-*"))
    point(run_dir / "checkpoints", "best", steps[0])
    assert torch.equal(load_drafter(run_dir).fc.weight, load_file(steps[0] / "model.safetensors")["fc.weight"])
    (steps[0] / "manifest.json").unlink()
    assert torch.equal(load_drafter(run_dir).fc.weight, load_file(steps[-1] / "model.safetensors")["fc.weight"])


@pytest.mark.slow
def test_a_reader_of_the_log_that_leaves_does_not_end_the_run(toy: Toy, tmp_path: Path) -> None:
    """Ctrl-C that also kills the `tee` behind stderr still saves, and exits 0."""
    program = (
        "import os\n"
        "from paceline.cli.progress import TrainProgress\n"
        "original = TrainProgress.step\n"
        "def step(self, line, total):\n"
        "    original(self, line, total)\n"
        "    if line['step'] == 3:\n"
        "        os.close(int(os.environ['READER'])); os.kill(os.getpid(), 2)\n"
        "TrainProgress.step = step\n"
        "from paceline.cli.main import main; main()"
    )
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(toy.config(tmp_path / "run", "data.epochs=100", "eval.validate_every=1")))
    reader, writer = os.pipe()
    command = [sys.executable, "-c", program, "train", str(file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path]), "READER": str(reader)}
    process = subprocess.Popen(command, stderr=writer, stdout=subprocess.DEVNULL, pass_fds=[reader], env=environment)
    os.close(writer)
    os.close(reader)
    assert process.wait(timeout=60) == 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())["ending"] == "SIGINT"
