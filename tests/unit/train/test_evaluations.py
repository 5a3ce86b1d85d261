"""Evaluation beside training, with programs in place of `paceline eval` that do what a test needs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.control.run_folder import RunFolder
from paceline.train import checkpoint, evaluations
from paceline.train.evaluations import Evaluations, measured_of
from paceline.train.metrics import read_metrics

GOOD = """
import json, sys, pathlib
out, length = sys.argv[1:]
pathlib.Path(out).write_text(json.dumps({"acceptance_length": float(length), "mismatches": 0, "prompts": 3}))
"""
HANGS = "import sys, time; print('begun', flush=True); time.sleep(60)"
WAITS = "import sys; sys.stdin.read()"

Make = Callable[..., Evaluations]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.checkpoints.mkdir()
    return folder


@pytest.fixture
def make(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Evaluations of the run; `program` is Python, called with the file for the result and the length of the step."""
    monkeypatch.setattr(evaluations, "LOOK_S", 0.02)
    made = []

    def build(
        program: str = GOOD, lengths: dict[int, float] | None = None, settings: dict[str, Any] | None = None
    ) -> Evaluations:
        def command(place: Path, out: Path) -> list[str]:
            length = (lengths or {}).get(int(place.name.removeprefix("step-")), 2.0)
            return [sys.executable, "-S", "-c", program, str(out), str(length)]

        made.append(
            Evaluations(
                run, every_steps=10, command=command, settings=lambda: settings or {"limit": 3}, environment=os.environ
            )
        )
        return made[-1]

    yield build
    for each in made:
        each.close()


def save(run: RunFolder, *steps: int) -> None:
    """Checkpoints that are complete as far as anybody looks."""
    for step in steps:
        place = checkpoint.place_of(run.checkpoints, step)
        place.mkdir()
        files = {}
        for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER, checkpoint.STATE, checkpoint.SHAPE):
            (place / name).write_bytes(b"x")
            files[name] = {"bytes": 1, "sha256": "0"}
        (place / checkpoint.MANIFEST).write_text(json.dumps({"format": checkpoint.FORMAT, "files": files}))


def evaluate(each: Evaluations, run: RunFolder, *steps: int) -> None:
    """Save checkpoints as a run does, one after the other, and wait."""
    for step in steps:
        save(run, step)
        each.expect(step)
        each.saved(step)
        each.wait(20)
    assert not each.is_busy


def events(run: RunFolder) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in map(json.loads, (run.path / "events.jsonl").open())]


def best(run: RunFolder) -> str:
    return os.readlink(run.checkpoints / "best")


def test_the_best_is_what_was_measured_to_be(make: Make, run: RunFolder) -> None:
    """`best` follows the longest acceptance, the earlier of equals, and each result is there for its step once."""
    each = make(lengths={10: 2.0, 20: 2.5, 30: 2.5, 40: 1.5})
    each.begin(0, False)
    evaluate(each, run, 10)
    assert best(run) == "step-00000010"
    evaluate(each, run, 20, 30, 40)
    assert best(run) == "step-00000020" and each.best is not None and each.best.step == 20
    assert [(m.step, m.acceptance_length) for m in each.take()] == [(10, 2.0), (20, 2.5), (30, 2.5), (40, 1.5)]
    assert each.take() == []
    assert events(run) == [("evaluated", step) for step in (10, 20, 30, 40)]
    record = measured_of(run, 30)
    assert record is not None and record["prompts"] == 3 and record["settings"] == {"limit": 3}
    assert measured_of(run, 50) is None


def test_only_what_is_expected_is_evaluated(make: Make, run: RunFolder) -> None:
    """A save that is not due, as one that was asked for, is left alone; due are multiples and the last."""
    each = make()
    each.begin(0, False)
    save(run, 7)
    each.saved(7)
    assert not each.is_busy
    assert each.is_due(10, False) and each.is_due(11, True) and not each.is_due(11, False)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('out of memory: 3 GiB'); sys.exit(3)", r"ended with 3; .* ends with: out of memory: 3 GiB"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with -9"),
        ("pass", "left no result: FileNotFoundError"),
        ("import sys; open(sys.argv[1], 'w').write('{')", "left no result: JSONDecodeError"),
        (GOOD.replace("float(length)", "float('nan')"), "left no result: ValueError"),
        ("import sys; open(sys.argv[1], 'w').write('[]')", "left no result: TypeError"),
    ],
    ids=["exit code", "killed", "nothing", "no JSON", "not a number", "no object"],
)
def test_a_failure_is_told_and_the_next_one_is_tried(
    make: Make, run: RunFolder, caplog: pytest.LogCaptureFixture, program: str, reason: str
) -> None:
    """A process that ends badly, or leaves nothing of use, costs one measurement; nothing of it counts as a result."""
    each = make(f"import sys\nif sys.argv[2] == '1.0':\n    exec({program!r})\n    sys.exit()\n{GOOD}", {10: 1.0})
    each.begin(0, False)
    evaluate(each, run, 10, 20)
    assert events(run) == [("evaluation failed", 10), ("evaluated", 20)]
    [record] = caplog.records
    assert re.search(reason, record.getMessage())
    assert [m.step for m in each.take()] == [20]
    assert [path.name for path in (run.path / "evaluations").glob("*.json")] == ["step-00000020.json"]
    each.ask(10)  # it was tried
    assert not each.is_busy


def test_a_program_that_is_not_there_is_a_failure(run: RunFolder) -> None:
    """What cannot be started at all is told like any failure."""
    each = Evaluations(
        run, every_steps=1, command=lambda place, out: ["/nowhere/python"], settings=dict, environment=os.environ
    )
    each.begin(0, False)
    evaluate(each, run, 1)
    each.close()
    assert events(run) == [("evaluation failed", 1)]


def test_a_silent_process_is_ended(make: Make, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing for too long is ended, with everything it started."""
    monkeypatch.setattr(evaluations, "SILENT_S", 0.3)
    each = make(HANGS)
    each.begin(0, False)
    evaluate(each, run, 10)
    assert events(run) == [("evaluation failed", 10)]


def test_what_cannot_keep_up_is_let_go_of(make: Make, run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Two wait at most; the oldest goes with an event, one warning comes, and what is needed still is pinned."""
    each = make(HANGS)
    each.begin(0, False)
    save(run, *range(10, 70, 10))
    for step in range(10, 70, 10):
        each.expect(step)
        each.saved(step)
        while step == 10 and not (run.path / "evaluations" / "step-00000010.log").exists():
            time.sleep(0.01)
    assert each.waiting() == [10, 50, 60]
    assert each.pinned() == {"step-00000010", "step-00000050", "step-00000060"}
    assert events(run) == [("evaluation dropped", 20), ("evaluation dropped", 30), ("evaluation dropped", 40)]
    assert len(caplog.records) == 1
    checkpoint.retain(run.checkpoints, checkpoint.place_of(run.checkpoints, 60), 1, None, each.pinned)
    assert checkpoint.complete_steps(run.checkpoints) == [10, 50, 60]


def test_the_end_of_a_run_is_not_held_up(make: Make, run: RunFolder) -> None:
    """Closing kills the process at once, tells no failure, and what comes after is ignored."""
    each = make(HANGS)
    each.begin(0, False)
    save(run, 10, 20)
    each.expect(10)
    each.expect(20)
    each.saved(10)
    while not (log := run.path / "evaluations" / "step-00000010.log").exists() or not log.read_bytes():
        time.sleep(0.01)
    began = time.monotonic()
    each.close()
    assert time.monotonic() - began < 3
    each.saved(20)
    assert not each.is_busy and not (run.path / "events.jsonl").exists()
    assert not list((run.path / "evaluations").glob("*.json"))


def test_a_process_is_connected_to_the_run(make: Make, run: RunFolder) -> None:
    """Its standard input stays open as long as the run lives, and its process group is its own."""
    each = make(f"import os, sys\nopen(sys.argv[1] + '.group', 'w').write(str(os.getpgid(0)))\n{WAITS}")
    each.begin(0, False)
    save(run, 10)
    each.expect(10)
    each.saved(10)
    group = run.path / "evaluations" / ".step-00000010.json.group"
    while not group.exists() or not group.read_text():
        time.sleep(0.01)
    assert each.is_busy and int(group.read_text()) != os.getpgid(0)


def test_a_new_start_takes_up_what_is_there(make: Make, run: RunFolder) -> None:
    """`best`, results, the newest due checkpoints without one; damaged and lost training's results do not count."""
    first = make(lengths={10: 3.0, 20: 2.0, 60: 9.0})
    first.begin(0, False)
    evaluate(first, run, 10, 20, 60)
    first.close()
    checkpoint.point(run.checkpoints, "best", checkpoint.place_of(run.checkpoints, 20))  # died before it was set right
    (run.path / "evaluations" / "step-00000020.json").write_text("{")
    (run.path / "evaluations" / ".step-00000030.json").write_text("{")
    save(run, 25, 30, 40, 50)
    again = make()
    found = again.begin(50, False)
    assert list(found) == [10] and found[10].line() == {"measured_acceptance_length": 3.0, "measured_mismatches": 0}
    assert best(run) == "step-00000010"
    again.wait(20)
    assert [m.step for m in again.take()] == [40, 50]
    assert not (run.path / "evaluations" / "step-00000060.json").exists()
    assert not list((run.path / "evaluations").glob(".*"))


@pytest.mark.parametrize(("is_over", "expected"), [(False, []), (True, [25])])
def test_the_last_step_is_made_up_for(make: Make, run: RunFolder, is_over: bool, expected: list[int]) -> None:
    """A run that is over and lacks its last evaluation gets it; in the midst of a run such a step is not due."""
    save(run, 25)
    each = make()
    each.begin(25, is_over)
    each.wait(20)
    assert [m.step for m in each.take()] == expected


def test_a_best_that_is_gone_is_none(make: Make, run: RunFolder) -> None:
    """Where somebody has removed the best checkpoint, the best of those that are there takes its place."""
    first = make(lengths={10: 9.0, 20: 3.0})
    first.begin(0, False)
    evaluate(first, run, 10, 20)
    first.close()
    shutil.rmtree(run.checkpoints / "step-00000010")
    again = make()
    again.begin(20, False)
    assert best(run) == "step-00000020" and again.best is not None and again.best.step == 20


def test_only_what_was_measured_alike_is_compared(make: Make, run: RunFolder) -> None:
    """After a change of the prompts earlier numbers choose nothing: the first one measured anew is the best."""
    first = make(lengths={10: 9.0})
    first.begin(0, False)
    evaluate(first, run, 10)
    first.close()
    again = make(lengths={10: 2.0, 20: 2.2}, settings={"limit": 7})
    again.begin(10, False)
    again.wait(20)  # the checkpoint is still there, and is measured again
    evaluate(again, run, 20)
    assert best(run) == "step-00000020" and [m.acceptance_length for m in again.take()] == [2.0, 2.2]


def test_a_full_disk_fails_no_run(
    make: Make, run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A result that cannot be written is told as a failure."""

    def full(name: str, content: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device", name)

    each = make()
    each.begin(0, False)
    monkeypatch.setattr(run, "write_json", full)
    evaluate(each, run, 10)
    assert events(run) == [("evaluation failed", 10)] and "No space left" in caplog.text


def test_a_folder_that_cannot_be_made_is_told(make: Make, run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Where something else has its name, the run goes on and each evaluation is a failure."""
    (run.path / "evaluations").write_text("")
    each = make()
    assert each.begin(0, False) == {}
    evaluate(each, run, 10)
    assert events(run) == [("evaluation failed", 10)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert read_metrics(run.metrics_file) == []
