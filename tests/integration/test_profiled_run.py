"""Whole runs with profiling: what is counted and covered, switching from outside, and runs that it must not disturb."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.observe import PROFILE_FOLDER
from paceline.cli.train import run_training
from paceline.errors import PipelineError
from paceline.profiling import stages
from paceline.profiling.live import STAGES_FILE
from paceline.profiling.page import CONTROL, SHARED_MEMORY, Control, Snapshot, pages_in, read_page, write_word
from paceline.train.loop import TrainLoop, TrainReport
from paceline.train.step import TrainStep
from tests.integration.test_training import same_training
from tests.toy import Toy, Watch

STEPS = 12
COVERED = 0.9
"""Share of every role's time that its stages have to account for."""


class Listener(Watch):
    """Also keeps what the run says."""

    def __init__(self, at_step: Any = lambda step: None) -> None:
        super().__init__(at_step)
        self.said: list[str] = []

    def show(self, text: str) -> None:
        self.said.append(text)

    @property
    def tables(self) -> list[str]:
        return [text for text in self.said if text.startswith("profile of")]


def run(toy: Toy, run_dir: Path, *overrides: str, at_step: Any = lambda step: None) -> tuple[TrainReport, Listener]:
    listener = Listener(at_step)
    try:
        return run_training(toy.config(run_dir, f"run.max_steps={STEPS}", *overrides), listener), listener
    finally:
        assert list(SHARED_MEMORY.glob(f"paceline-*-{os.getpid()}-*")) == pages_in(run_dir / PROFILE_FOLDER) == []
        assert not stages.is_on() and stages._page is None


def records(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / PROFILE_FOLDER / STAGES_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def counts(record: dict[str, Any]) -> dict[str, int]:
    return {name: stage["count"] for name, stage in record["stages"].items() if stage["count"]}


@pytest.fixture(scope="module")
def plain(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Steps of a run that nobody profiles."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    _, listener = run(toy, run_dir)
    assert records(run_dir) == [] and not (run_dir / PROFILE_FOLDER / STAGES_FILE).exists() and listener.tables == []
    return listener.lines


def test_a_split_run_says_where_its_time_went(toy: Toy, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    """The interval that the end cuts short is printed and recorded: every batch and step is counted, in its role, and
    training is what it is without."""
    report, listener = run(toy, tmp_path, "profiling.interval=600", "topology.targets=2")
    assert same_training(listener.lines) == same_training(plain)
    (table,) = listener.tables
    assert any(text.startswith("profiling is on, a table every 600 s") for text in listener.said)
    assert f", steps 1 to {STEPS}" in table and "  drafter-0" in table and "  target-1" in table
    roles = {record["role"]: record for record in records(tmp_path)}
    assert sorted(roles) == ["checkpoint", "drafter-0", "target-0", "target-1"] and len(records(tmp_path)) == 4
    drafter = counts(roles["drafter-0"])
    batches = sum(line["batches"] for line in listener.lines)
    expected = {"draw_blocks": batches, "backward": batches, "optimizer": STEPS, "grad_norm_item": STEPS, "validate": 2}
    assert {name: drafter[name] for name in expected} == expected and roles["drafter-0"]["batches"] == batches
    made = [counts(roles[role])["read_batch"] for role in ("target-0", "target-1")]
    assert sum(made) == report.ledger["issued"] and min(made) > 0


@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_stages_cover_the_time_of_their_roles(toy: Toy, tmp_path: Path, layout: str) -> None:
    """Nine tenths of a role's time are in its stages: of targets in any layout, and of a drafter that shares its
    processor with none. (A drafter that wakes a target on a busy machine is held up between stages by that.)"""
    for attempt in range(3):  # a machine that is busy with other things now and then stops a thread anywhere
        folder = tmp_path / str(attempt)
        run(toy, folder, "profiling.interval=600", f"topology.layout={layout}")
        shares = {record["role"]: record["other_s"] / record["wall_s"] for record in records(folder)}
        del shares["checkpoint"]  # which sleeps most of the time
        assert shares.keys() == {"drafter-0", "target-0"}
        if layout == "split":
            del shares["drafter-0"]
        if max(shares.values()) <= 1 - COVERED:
            return
    pytest.fail(f"shares of time in no stage, three times over: {shares}")


def test_a_colocated_run_counts_both_of_its_roles(toy: Toy, tmp_path: Path) -> None:
    """Target and drafter take turns in one thread and each has its own stages; layers that are computed again in the
    backward pass are told apart from those of the forward pass, and are no failures."""
    overrides = "profiling.interval=600", "topology.layout=colocated", "draft.recompute=true", "data.validation=0"
    report, listener = run(toy, tmp_path, *overrides)
    roles = {record["role"]: record for record in records(tmp_path)}
    assert sorted(roles) == ["checkpoint", "drafter-0", "target-0"]
    assert roles["drafter-0"]["tid"] == roles["target-0"]["tid"] != roles["checkpoint"]["tid"]
    found = roles["drafter-0"]["stages"]
    batches = sum(line["batches"] for line in listener.lines)
    assert found["forward"]["count"] == found["layers"]["count"] == found["get_wait"]["count"] == batches
    assert found["recompute"]["count"] == 2 * batches  # two layers
    assert [name for record in roles.values() for name, stage in record["stages"].items() if "errors" in stage] == []
    assert counts(roles["target-0"])["read_batch"] == report.ledger["trained"] == batches


def test_a_run_is_switched_on_and_off_from_outside(toy: Toy, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    """By a word of its page: exactly the stages from then on until then are counted, whatever was open at either moment
    in no part; before, the page shows where threads are and nothing is written."""
    seen: dict[int, Snapshot] = {}

    def at_step(step: int) -> None:
        (path,) = pages_in(tmp_path / PROFILE_FOLDER)
        seen[step] = read_page(path)
        if step == 3:
            assert not (tmp_path / PROFILE_FOLDER / STAGES_FILE).exists()
            write_word(path, CONTROL, Control(1, True, 600.0).word)
        if step == 9:
            write_word(path, CONTROL, Control(2, False).word)

    _, listener = run(toy, tmp_path, at_step=at_step)
    assert same_training(listener.lines) == same_training(plain)
    drafter = {step: next(t for t in page.threads if t.role == "drafter-0") for step, page in seen.items()}
    assert all(thread.inner is not None and thread.inner.stage == "log" for thread in drafter.values())
    assert not any(stats.count for stats in drafter[3].stages.values()) and seen[3].gauges["step"] == 3
    last = {name: stats.count for name, stats in drafter[12].stages.items()}
    assert last["optimizer"] == last["grad_norm_item"] == 6 and last["draw_blocks"] == 12
    assert last["log"] == 3 * 6 - 1  # the one at step 9 was open at the switch
    assert drafter[12].stages == drafter[10].stages


def test_a_run_that_fails_still_prints_its_last_interval(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure travels unchanged, no page is left, and the table of the time until then is there."""
    original = TrainStep.update

    def update(self: TrainStep, step: int) -> Any:
        if step == 2:
            raise RuntimeError("out of luck")
        return original(self, step)

    monkeypatch.setattr(TrainStep, "update", update)
    listener = Listener()
    with pytest.raises(PipelineError, match="out of luck"):
        run_training(toy.config(tmp_path, "profiling.interval=600"), listener)
    assert list(SHARED_MEMORY.glob(f"paceline-*-{os.getpid()}-*")) == []
    (table,) = listener.tables
    assert "steps 1 to 2" in table
    assert [counts(r)["optimizer"] for r in records(tmp_path) if r["role"] == "drafter-0"] == [2]


def test_a_run_without_room_for_a_page_trains_on(
    toy: Toy,
    plain: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where neither memory nor the run folder has room profiling is off with one warning, and nothing else changes."""

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    report, listener = run(toy, tmp_path, "profiling.interval=0.1")
    assert report.ending == "finished" and same_training(listener.lines) == same_training(plain)
    warnings = [record.getMessage() for record in caplog.records if "profiling" in record.getMessage()]
    assert len(warnings) == 1 and "No space left on device" in warnings[0]
    assert records(tmp_path) == [] and listener.tables == []


def test_a_run_whose_records_cannot_be_written_trains_on(
    toy: Toy, plain: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fills up in the middle of it costs the profile and a warning, not the run."""
    (tmp_path / PROFILE_FOLDER / STAGES_FILE).mkdir(parents=True)
    report, listener = run(toy, tmp_path, "profiling.interval=0.1")
    assert report.ending == "finished" and same_training(listener.lines) == same_training(plain)
    warnings = [record.getMessage() for record in caplog.records if "profiling" in record.getMessage()]
    assert len(warnings) == 1 and "stages.jsonl cannot be written" in warnings[0] and len(listener.tables) == 1


def test_a_pause_is_no_wait_of_the_targets(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What targets wait while the drafter validates or saves counts in the report and in no step's line, whose seconds
    leave the pause out as well."""
    original = TrainLoop._measure

    def slow(self: TrainLoop, *args: Any) -> bool:
        time.sleep(0.2)
        return original(self, *args)

    monkeypatch.setattr(TrainLoop, "_measure", slow)
    report, listener = run(toy, tmp_path, "pipeline.queue_depth=1", "eval.validate_every=2")
    in_lines = sum(line["put_wait_s"] for line in listener.lines)
    num_pauses = sum("validation_acceptance_length" in line for line in listener.lines)
    assert num_pauses >= 2 and report.put_wait_s > in_lines + 0.15 * (num_pauses - 1)
    assert sum(line["seconds"] for line in listener.lines) < report.seconds - 0.2 * num_pauses
