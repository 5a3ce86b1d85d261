"""Evaluation beside training: no pause, no other bits, the right line, and the best checkpoint by what was measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from paceline.cli import child
from paceline.cli.main import app
from paceline.cli.provenance import provenance_of
from paceline.cli.train import build_evaluations
from paceline.config import dump_config
from paceline.control.run_folder import RunFolder
from paceline.errors import ConfigError, DataError
from paceline.train.metrics import read_metrics
from tests.integration.test_training import assert_same_bits, same_training
from tests.toy import Toy, train

LENGTHS = {6: 2.0, 12: 3.0, 18: 2.5}
"""What the stand-in measures, by step."""

STAND_IN = f"""
import json, pathlib, sys, time
options = dict(each.split("=", 1) for each in sys.argv[1:] if "=" in each)
step = int(options["--draft"][-8:])
if pathlib.Path(__file__).with_name("hang").exists():
    print("begun", flush=True)
    sys.stdin.read()
assert pathlib.Path(options["--draft"], "manifest.json").is_file()
record = {{"acceptance_length": {LENGTHS}[step], "mismatches": 0, "options": options}}
pathlib.Path(options["--json"]).write_text(json.dumps(record))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of `paceline eval`; it hangs while a file called hang lies beside it."""
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(child, "__file__", str(program))
    monkeypatch.setattr("paceline.train.evaluations.LOOK_S", 0.02)
    monkeypatch.setattr("paceline.train.loop.AWAIT_S", 0.02)
    return program


def measured(run_dir: Path) -> dict[int, float]:
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {line["step"]: line["measured_acceptance_length"] for line in lines if "measured_acceptance_length" in line}


def until(is_so: object, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_is_measured_joins_its_line_and_chooses_the_best(toy: Toy, tmp_path: Path, stand_in: Path) -> None:
    """Losses and weights are those of a run without; due steps are saved and kept until they are measured."""
    plain, run_dir = tmp_path / "plain", tmp_path / "run"
    _, expected = train(toy.config(plain, "run.max_steps=18"))
    options = ("eval.every_steps=6", "checkpoint.every_steps=1000", "checkpoint.keep_last=1")
    config = toy.config(run_dir, "run.max_steps=18", *options)
    report, lines = train(config)
    assert same_training(lines) == same_training(expected)
    assert_same_bits(plain, run_dir)
    assert measured(run_dir) == LENGTHS
    assert os.readlink(run_dir / "checkpoints" / "best") == "step-00000012"
    assert (report.best_measured_acceptance_length, report.best_measured_step) == (3.0, 12)
    assert report.best_acceptance_length == max(line.get("validation_acceptance_length", 0) for line in lines)
    card = provenance_of(run_dir, None)
    assert card.step == 12 and card.evaluation["acceptance_length"] == 3.0
    options = json.loads((run_dir / "evaluations" / "step-00000012.json").read_text())["options"]
    assert options["--target"] == str(toy.target) and options["--device"] == "cpu" and "--thinking" not in options
    state = json.loads(CliRunner().invoke(app, ["status", str(run_dir), "--json"]).stdout)
    assert state["evaluation"] == {"step": 18, "acceptance_length": 2.5}


def test_a_stop_does_not_wait_and_the_next_start_makes_it_up(toy: Toy, tmp_path: Path, stand_in: Path) -> None:
    """An evaluation that hangs holds up neither training nor a stop; what is missing is measured by a later start."""
    hang, run_dir = stand_in.with_name("hang"), tmp_path / "run"
    hang.touch()
    config = toy.config(run_dir, "run.max_steps=18", "eval.every_steps=6")

    def at_step(step: int) -> None:
        if step == 14:
            until((run_dir / "evaluations" / "step-00000006.log").read_bytes)
            os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    report, _ = train(config, at_step)
    assert report.ending == "SIGINT" and time.monotonic() - began < 30
    assert not list((run_dir / "evaluations").glob("*.json")) and measured(run_dir) == {}
    hang.unlink()
    report, _ = train(config)
    assert report.ending == "finished" and measured(run_dir) == LENGTHS
    assert os.readlink(run_dir / "checkpoints" / "best") == "step-00000012"
    (run_dir / "evaluations" / "step-00000018.json").unlink()
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in read_metrics(run_dir / "metrics.jsonl") if line.pop("lr"))
    )
    report, lines = train(config)  # over, but for its last evaluation
    assert report.ending == "finished" and lines == [] and measured(run_dir) == LENGTHS


def test_a_result_that_no_line_got_is_joined(toy: Toy, tmp_path: Path, stand_in: Path) -> None:
    """Whatever a killed process had measured and not written down is in its line after the next start."""
    config = toy.config(tmp_path / "run", "run.max_steps=18", "eval.every_steps=6", "checkpoint.keep_last=9")
    train(config)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = read_metrics(path)
    for line in lines:
        line.pop("measured_acceptance_length", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run" / "checkpoints" / "best").unlink()
    train(config)
    assert measured(tmp_path / "run") == LENGTHS
    assert os.readlink(tmp_path / "run" / "checkpoints" / "best") == "step-00000012"


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("eval.prompts=/nowhere.jsonl", DataError, "/nowhere.jsonl"),
        ("eval.prompts=[]", ConfigError, "there is no prompt in it"),
        ("eval.device=cuda:99", ConfigError, "eval.device='cuda:99'"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    toy: Toy, tmp_path: Path, override: str, error: type[Exception], message: str
) -> None:
    """Prompts that are not there, none at all and a missing GPU are errors at the start, and leave no run folder."""
    with pytest.raises(error, match=message):
        train(toy.config(tmp_path / "run", "eval.every_steps=6", override))
    assert not (tmp_path / "run").exists()


def test_the_command_understands_what_it_is_given(toy: Toy, tmp_path: Path) -> None:
    """Every setting of the run arrives at its option of `paceline eval`."""
    settings = ("eval.every_steps=6", "eval.limit=2", "eval.max_new_tokens=8", "target.revision=main")
    prompts = ("eval.prompts=[a.jsonl, b.jsonl]", "target.trust_remote_code=true", "eval.device=cuda:1")
    config = toy.config(tmp_path, *settings, *prompts)
    info = SimpleNamespace(thinking=False)
    resolved = SimpleNamespace(config=config, dataset=SimpleNamespace(info=info))
    each = build_evaluations(RunFolder(tmp_path), resolved)  # type: ignore[arg-type]
    command = each._command(Path("step-00000006"), Path("out.json"))
    assert command[1:3] == [child.__file__, "eval"]
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    given = group.commands["eval"].make_context("eval", list(command[3:])).params
    assert {name: given[name] for name in ("target", "revision", "limit", "max_new_tokens", "thinking")} == {
        "target": str(toy.target), "revision": "main", "limit": 2, "max_new_tokens": 8, "thinking": "off",
    }  # fmt: skip
    assert given["prompts"] == [Path("a.jsonl"), Path("b.jsonl")] and given["draft"] == Path("step-00000006")
    assert given["device"] == "cuda:1" and given["json_file"] == "out.json"
    assert given["trust_remote_code"] is True and given["ngram"] is False


@pytest.mark.slow
def test_a_real_evaluation(toy: Toy, tmp_path: Path) -> None:
    """The command itself decodes with the last checkpoint: nothing differs, and its record is in the run folder."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "count 3 from 1"}\n{"prompt": "count 4 from 2"}\n{"prompt": "unused"}\n')
    options = ("eval.every_steps=1000", f"eval.prompts={prompts}", "eval.limit=2", "eval.max_new_tokens=8")
    report, _ = train(toy.config(tmp_path / "run", "run.max_steps=2", *options))
    record = json.loads((tmp_path / "run" / "evaluations" / "step-00000002.json").read_text())
    assert record["prompts"] == 2 and record["mismatches"] == 0 and record["generated_tokens"] == 16
    assert measured(tmp_path / "run") == {2: record["acceptance_length"]}
    assert report.best_measured_step == 2 and record["acceptance_length"] >= 1


@pytest.mark.slow
def test_the_process_dies_with_the_run(toy: Toy, tmp_path: Path) -> None:
    """Killed with SIGKILL, a trainer leaves no process behind that goes on evaluating."""
    run_dir, run_file = tmp_path / "run", tmp_path / "run.yaml"
    run_file.write_text(dump_config(toy.config(run_dir, "eval.every_steps=2", "data.epochs=200")))
    trainer = subprocess.Popen([sys.executable, "-m", "paceline", "train", str(run_file)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: any(child_of(trainer.pid, child.__file__)))
        [evaluating] = child_of(trainer.pid, child.__file__)
    finally:
        trainer.kill()
        trainer.wait()
    until(lambda: Path(f"/proc/{evaluating}/cmdline").read_bytes() == b"", 10.0)  # a zombie has none


def child_of(pid: int, program: str) -> list[int]:
    """Processes that this one started and that run a program."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for number in (task / "children").read_text().split():
            if program.encode() in Path(f"/proc/{number}/cmdline").read_bytes():
                found.append(int(number))
    return found
