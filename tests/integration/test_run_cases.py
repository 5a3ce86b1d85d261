"""Cases R02 (a resumed run is the straight run), R04 (failures travel) and P03 (payloads arrive whole), by whole runs.

A run here has 14 steps of two batches, 7 of them an epoch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli.main import run as command_line
from paceline.config import dump_config
from paceline.control.signals import StopRequest
from paceline.data.packing import PackedBatches
from paceline.errors import PipelineError
from paceline.models.target import Target
from paceline.pipeline.coordinator import Coordinator
from paceline.pipeline.local import open_stream
from paceline.records import FeatureBatch, TokenBatch
from paceline.train import checkpoint
from paceline.train.step import TrainStep
from tests.toy import Toy, train

EPOCHS, STEPS, EPOCH_STEPS = 2, 14, 7
LIMIT_S = 10.0
Lines = list[dict[str, Any]]


def settings(*more: str) -> tuple[str, ...]:
    return (f"data.epochs={EPOCHS}", "draft.num_layers=1", "topology.layout=split", "topology.targets=2", *more)


# ----------------------------------------------------------------------------------- R02: a resumed run is the straight
R02 = settings("eval.validate_every=1", "checkpoint.every_steps=4", "optim.warmup_ratio=0.3")


class Rows:
    """Which data set rows the drafter is trained on, and in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_batch: dict[int, tuple[int, ...]] = {}
        real = TrainStep.accumulate

        def accumulate(step: TrainStep, features: FeatureBatch) -> Any:
            self.by_batch[features.tokens.number] = features.tokens.rows
            return real(step, features)

        monkeypatch.setattr(TrainStep, "accumulate", accumulate)

    def in_order(self) -> list[int]:
        return [row for number in sorted(self.by_batch) for row in self.by_batch[number]]


def run_with_stops(toy: Toy, run: Path, stops: list[int], rows: Rows) -> Lines:
    """Train with a stop after each of the steps; the metrics file's lines."""
    config = toy.config(run, *R02)
    requests = list[StopRequest]()
    enter = StopRequest.__enter__

    def entered(self: StopRequest) -> StopRequest:
        requests.append(self)
        return enter(self)

    def stop_after(stop: int | None, step: int) -> None:
        if step == stop:
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + LIMIT_S
            while not requests[-1] and time.monotonic() < deadline:  # a thread of its own reads the signal
                time.sleep(0.001)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopRequest, "__enter__", entered)
        for stop in [*stops, None]:
            report, _ = train(config, functools.partial(stop_after, stop))
            assert report.step == (stop or STEPS)
    assert len(rows.by_batch) == 2 * STEPS
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learning_rates(total: int, base: float, warmup_ratio: float, floor: float) -> list[float]:
    """The documented schedule: a linear rise whose first update moves already, then half a cosine to the floor."""
    warmup = math.ceil(warmup_ratio * total)
    rise = [base * (step + 1) / warmup for step in range(warmup)]
    fall = [0.5 * (1 + math.cos(math.pi * step / (total - warmup))) for step in range(total - warmup)]
    return rise + [base * (floor + (1 - floor) * part) for part in fall]


@pytest.fixture(scope="module")
def straight(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lines, Rows]:
    run = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        rows = Rows(patch)
        return run, run_with_stops(toy, run, [], rows), rows


def test_every_row_is_trained_on_once_an_epoch(toy: Toy, straight: tuple[Path, Lines, Rows]) -> None:
    """Case R02: an epoch is an order of all rows, and each has its own; the rate is the documented schedule's."""
    run, lines, rows = straight
    order = rows.in_order()
    per_epoch = len(order) // EPOCHS
    epochs = [order[:per_epoch], order[per_epoch:]]
    assert all(len(set(epoch)) == per_epoch for epoch in epochs) and set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    assert {row for number in range(2 * EPOCH_STEPS) for row in rows.by_batch[number]} == set(epochs[0])
    optim = toy.config(run, *R02).optim
    wanted = learning_rates(STEPS, optim.lr, optim.warmup_ratio, optim.min_lr_ratio)
    assert [line["lr"] for line in lines] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("stops", [[3], [EPOCH_STEPS], [3, 4, 8]], ids=["split", "at the epoch's end", "thrice"])
def test_a_split_run_is_the_straight_run(
    toy: Toy, straight: tuple[Path, Lines, Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: list[int]
) -> None:
    """Case R02: with a validation pass before every stop, rows, rates, losses, weights and moments are the same."""
    rows = Rows(monkeypatch)
    lines = run_with_stops(toy, tmp_path, stops, rows)
    assert rows.by_batch == straight[2].by_batch
    keys = ("step", "batch", "loss", "lr", "grad_norm", "tokens", "validation_acceptance_length")
    assert [[line[key] for key in keys] for line in lines] == [[line[key] for key in keys] for line in straight[1]]
    assert_same_state(straight[0], tmp_path)


def assert_same_state(one: Path, other: Path) -> None:
    """Weights, moments and counters are the same bits, and the counters exact."""
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        mine, its = (load_file(run / "checkpoints" / "latest" / name) for run in (one, other))
        assert mine.keys() == its.keys()
        for key, value in mine.items():
            assert torch.equal(value, its[key]) and value.dtype == its[key].dtype == torch.float32, key
            if key.startswith("step."):
                assert value.item() == STEPS
    states = [checkpoint.load_state(run / "checkpoints" / "latest") for run in (one, other)]
    assert states[0] == states[1]


# -------------------------------------------------------------------------------------------- R04: failures travel
R04 = settings("pipeline.queue_depth=2", "checkpoint.every_steps=5", "eval.validate_every=100")


@pytest.fixture(scope="module")
def whole(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole")
    train(toy.config(run, *R04))
    return run


class Fault:
    """Raises where it is planted, as often as it is told to, and knows when it did so first."""

    def __init__(self, text: str, times: float = math.inf) -> None:
        self.text, self.times = text, times
        self.first: float | None = None

    def strike(self) -> None:
        if self.times > 0:
            self.times -= 1
            self.first = self.first or time.monotonic()
            raise RuntimeError(self.text)


def plant(patch: pytest.MonkeyPatch, owner: type, name: str, is_due: Callable[..., bool], fault: Fault) -> None:
    real = getattr(owner, name)

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_due(*args):
            fault.strike()
        return real(self, *args, **kwargs)

    patch.setattr(owner, name, failing)


def run_command(toy: Toy, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """`paceline train` in this process; its exit code."""
    file = folder / "run.yaml"
    file.write_text(dump_config(toy.config(folder / "run", *R04)))
    patch.setattr(sys, "argv", ["paceline", "train", str(file)])
    with pytest.raises(SystemExit) as ended:
        command_line()
    return int(ended.value.code or 0)


FAULTS: dict[str, tuple[type, str, Callable[..., bool], str]] = {
    "toy failure 7": (Target, "features", lambda tokens, *_: tokens.number == 7, r"target-[01] failed"),
    "toy failure 3": (PackedBatches, "batch", lambda number: number == 3, r"target-[01] failed"),
    "toy failure in trainer": (
        TrainStep,
        "accumulate",
        lambda features: features.tokens.number == 8,
        "drafter-0 failed",
    ),
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_failure_ends_the_run_with_its_own_traceback(
    toy: Toy,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    """Case R04: within 10 s, by exit code 1, role, batch and traceback, threads released; a new start loses nothing."""
    owner, name, is_due, role = FAULTS[text]
    fault = Fault(text)
    with monkeypatch.context() as patch:
        plant(patch, owner, name, is_due, fault)
        assert run_command(toy, tmp_path, patch) == 1
    assert fault.first is not None and time.monotonic() - fault.first < LIMIT_S
    output = capsys.readouterr().err
    assert output.count("Traceback") == 1 and f"RuntimeError: {text}" in output and "in strike" in output
    number = {"toy failure 7": 7, "toy failure 3": 3}.get(text, 8)
    last = output.strip().splitlines()[-4:]
    assert any(line.startswith("paceline: ") for line in last)
    assert re.search(rf"{role}.* on batch {number}", output)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("target-")]
    newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and checkpoint.load_state(newest).step == number // 2
    assert run_command(toy, tmp_path, monkeypatch) == 0
    assert_same_state(whole, tmp_path / "run")


def test_a_failure_that_passes_changes_nothing(
    toy: Toy, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case R04: a batch that its target makes at the second try is in the same place; the retry is counted."""
    plant(monkeypatch, Target, "features", lambda tokens, *_: tokens.number == 7, Fault("passes", times=1))
    assert run_command(toy, tmp_path, monkeypatch) == 0
    assert_same_state(whole, tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "report.json").read_text())["ledger"]
    assert ledger == {"issued": 28, "trained": 28, "in_flight": 0, "skipped": 0, "retried": 1}


def spoil(patch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """Make the features of some batches NaN."""
    real = Target.features

    def features(self: Target, tokens: TokenBatch, *args: Any) -> FeatureBatch:
        made = real(self, tokens, *args)
        if not is_bad(tokens.number):
            return made
        return replace(made, context_feature=torch.full_like(made.context_feature, math.nan))

    patch.setattr(Target, "features", features)


def test_one_bad_batch_is_left_out_and_counted(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case R04: the others are trained on, the run finishes, and the batch is written down with its rows."""
    spoil(monkeypatch, lambda number: number == 6)
    assert run_command(toy, tmp_path, monkeypatch) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["ending"] == "finished" and report["step"] == STEPS
    assert (report["ledger"]["skipped"], report["ledger"]["trained"]) == (1, 27)
    (bad,) = map(json.loads, (tmp_path / "run" / "bad_batches.jsonl").read_text().splitlines())
    assert bad["batch"] == 6 and len(bad["rows"]) == len(bad["sources"]) > 0


def test_a_run_of_bad_batches_fails(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R04: where every batch fails the run is no finished one, and its exit code says so."""
    spoil(monkeypatch, lambda number: True)
    assert run_command(toy, tmp_path, monkeypatch) == 1
    assert "run.max_bad_batches" in capsys.readouterr().err
    assert not (tmp_path / "run" / "report.json").exists()


# ----------------------------------------------------------------------------------------- P03: payloads arrive whole
def features_of(number: int, num_tokens: int, delivered: int | None = None) -> FeatureBatch:
    """Features whose every element is the batch's number."""
    ids = torch.arange(num_tokens)
    tokens = TokenBatch.pack(number, [(number, ids, torch.ones(num_tokens, dtype=torch.bool))], num_tokens)
    length = num_tokens if delivered is None else delivered
    return FeatureBatch(tokens, torch.full((length, 6), float(number)), torch.full((length, 2), float(number)))


def stream_of(make: Callable[[int], FeatureBatch], end: int, *, max_retries: int = 0, targets: int = 2) -> Any:
    return open_stream(
        make,
        Coordinator(0, end),
        layout="split",
        targets=targets,
        threads=1,
        queue_depth=1,
        max_bytes=1 << 30,
        min_ready=1,
        max_retries=max_retries,
    )


@pytest.mark.parametrize("delay_s", [0.0, 0.003])
def test_every_payload_is_its_own(delay_s: float) -> None:
    """Case P03: of 200 batches of three lengths through one slot all elements are the batch's own when read."""
    lengths, seen, kept = (5, 17, 64), 0, list[FeatureBatch]()
    with stream_of(lambda number: features_of(number, lengths[number % 3]), 200) as stream:
        for number, batch in enumerate(stream):
            time.sleep(delay_s)
            assert batch.tokens.number == number and batch.tokens.rows == (number,)
            for each in (batch.context_feature, batch.last_hidden):
                assert len(each) == lengths[number % 3] and bool((each == number).all())
            kept = [*kept[-2:], batch]  # a step holds several: those before must not have been written over
            assert all(bool((each.context_feature == each.tokens.number).all()) for each in kept)
            seen += 1
    assert seen == 200


def test_a_short_payload_is_refused_with_both_lengths() -> None:
    """Case P03: 6 of 70 tokens are neither padded nor cut to fit; they are made again, or end the run."""
    lengths, tries = {0: 42, 1: 70, 2: 43, 3: 45}, list[int]()

    def make(number: int, heals: bool) -> FeatureBatch:
        tries.append(number)
        is_short = number == 1 and not (heals and tries.count(1) > 1)
        return features_of(number, lengths[number], 6 if is_short else None)

    with stream_of(lambda number: make(number, heals=True), 4, max_retries=1) as stream:
        assert [len(batch.context_feature) for batch in stream] == list(lengths.values())
    assert tries.count(1) == 2
    with (
        stream_of(lambda number: make(number, heals=False), 4, targets=1) as stream,
        pytest.raises(PipelineError, match=r"target-0 .*\b6 tokens of 70.*batch 1"),
    ):
        list(stream)


def test_a_payload_of_another_batch_is_refused() -> None:
    """Case P03: what arrives is matched by its number, and never by its place in the queue."""
    with (
        stream_of(lambda number: features_of(number + (number == 2), 8), 4, targets=1) as stream,
        pytest.raises(PipelineError, match=r"features of batch 3.*where batch 2 was wanted"),
    ):
        list(stream)
