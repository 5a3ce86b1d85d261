"""The command as a person or a script meets it: messages, exit codes, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.config import dump_config
from tests.toy import Toy, train

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paceline", *map(str, arguments)]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, env=environment(), cwd=cwd
    )


def run_file(toy: Toy, folder: Path, *overrides: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(dump_config(toy.config(folder / "run", *overrides)))
    return path


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a step is logged."""
    deadline = time.monotonic() + PATIENCE_S
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.is_file() and any(f'"step": {step},' in line for line in metrics.read_text().splitlines()):
            return
        assert process.poll() is None, "the run ended early"
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


LONG = ("data.epochs=400", "eval.validate_every=1000", "checkpoint.every_steps=7")


def test_train_resume_and_export_from_the_command_line(toy: Toy, tmp_path: Path) -> None:
    """A run trains, is gone on with by `train`, `resume` finds nothing left, and its drafter exports."""
    file = run_file(toy, tmp_path, "run.max_steps=4")
    first = run("train", file, "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["ending"] == "finished"
    again = run("train", file)
    assert again.returncode == 0 and "finished at step 4 of 4" in again.stdout
    resumed = run("resume", tmp_path / "run", "--json")
    assert resumed.returncode == 0 and json.loads(resumed.stdout)["tokens"] == 0
    exported = run("export", tmp_path / "run", "--format", "zlab", "--out", tmp_path / "export")
    assert exported.returncode == 0 and '"num_speculative_tokens": 3' in exported.stdout
    assert (tmp_path / "export" / "config.json").is_file()


def test_a_dry_run_prints_the_plan_and_writes_nothing(toy: Toy, tmp_path: Path) -> None:
    """--dry-run resolves every auto, shows the memory by part, and makes no run folder."""
    result = run("train", run_file(toy, tmp_path), "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert plan["config"]["draft"]["mask_token_id"] == 267
    assert plan["plan"]["steps"] > 0 and plan["memory"]["total_gib"] > 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_background_run_stops_gracefully_and_goes_on_exactly(toy: Toy, tmp_path: Path, number: int) -> None:
    """Started with SIGINT ignored, as under nohup, one signal saves and exits 0; resumed, it equals a straight run."""
    file = run_file(toy, tmp_path, *LONG)
    process = subprocess.Popen(
        command("train", file),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    stopped = json.loads((tmp_path / "run" / "report.json").read_text())
    assert stopped["ending"] == signal.Signals(number).name
    latest = (tmp_path / "run" / "checkpoints" / "latest").resolve()
    assert latest.name == f"step-{stopped['step']:08d}"

    # the schedule spans the whole run, so the straight run has the same file and is stopped one step later
    last = stopped["step"] + 1

    def stop_at(step: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    train(toy.config(tmp_path / "run", *LONG), stop_at)
    train(toy.config(tmp_path / "straight", *LONG), stop_at)
    for name in ("model.safetensors", "optimizer.safetensors"):
        resumed, straight = (load_file(tmp_path / d / "checkpoints" / "latest" / name) for d in ("run", "straight"))
        assert resumed.keys() == straight.keys()
        assert [key for key in resumed if not resumed[key].equal(straight[key])] == []


def test_a_second_signal_ends_at_once_and_harms_nothing(toy: Toy, tmp_path: Path) -> None:
    """Two signals in a row exit non-zero at once; the last checkpoint is intact and the run resumes."""
    file = run_file(toy, tmp_path, *LONG, "optim.tokens_per_step=12800")
    process = subprocess.Popen(command("train", file), env=environment(), stderr=subprocess.DEVNULL)
    wait_for_step(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGSTOP)  # both arrive before it can act on the first
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=10) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    report, _ = train(toy.config(tmp_path / "run", *LONG, "optim.tokens_per_step=12800"), _stop_after(2))
    assert report.step == 2


def test_a_killed_run_goes_on_from_its_last_checkpoint(toy: Toy, tmp_path: Path) -> None:
    """kill -9 loses only the steps since the last save, and the metrics are cut back to it."""
    file = run_file(toy, tmp_path, *LONG)
    process = subprocess.Popen(command("train", file), env=environment(), stderr=subprocess.DEVNULL)
    wait_for_step(tmp_path / "run", 9, process)
    process.kill()
    process.wait()
    _, lines = train(toy.config(tmp_path / "run", *LONG), _stop_after(30))
    assert lines[0]["step"] % 7 == 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 31))


def _stop_after(last: int):
    def at_step(step: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGINT)

    return at_step


def test_a_failing_role_ends_with_its_traceback_and_exit_code_1(toy: Toy, tmp_path: Path) -> None:
    """A role's failure prints the original traceback, then role and batch."""
    program = (
        "import sys; from paceline.models.target import Target\n"
        "def features(self, tokens, cache=None): raise RuntimeError('toy failure 7')\n"
        "Target.features = features\n"
        "from paceline.cli.main import main; main()"
    )
    file = run_file(toy, tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", program, "train", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(),
        cwd=ROOT,
    )
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "toy failure 7" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("paceline: target-0 failed on batch 0")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "{tmp}/missing.yaml"], ["missing.yaml cannot be read"]),
        (["train", "{file}", "optim.learnrate=1"], ["unknown key optim.learnrate"]),
        (["train", "{file}", "target.pth=x"], ["unknown key target.pth; did you mean target.path?"]),
        (["train", "{file}", "data.path={tmp}/nothing"], ["{tmp}/nothing", "paceline prepare"]),
        (["train", "{file}", "target.path={tmp}"], ["has no config.json"]),
        (["train", "{file}", "target.path=./no/such/target"], ["no/such/target"]),
        (["train", "{file}", "draft.mask_token_id=272"], ["draft.mask_token_id=272", "token 267 is unused"]),
        (["train", "{file}", "pipeline.min_ready=9", "pipeline.queue_depth=2"], ["min_ready=9 is above"]),
        (["train", "{file}", "run.dir={file}/run"], ["Not a directory", "{file}/run"]),
        (["resume", "{tmp}/nothing"], ["is no run folder"]),
        (["export", "{tmp}", "--format", "zlab", "--out", "{tmp}/x"], ["holds no complete checkpoint"]),
        (["prepare", "{tmp}/missing.jsonl", "--tokenizer", "{target}", "--out", "{tmp}/x"], ["missing.jsonl"]),
        (["frobnicate"], ["No such command"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("train", "resume", "export", "prepare") else "",
)
def test_mistakes_are_answered(
    toy: Toy,
    tmp_path: Path,
    arguments: list[str],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each mistake gives a message with what was seen and what to do, no traceback, and nothing half-written."""
    from paceline.cli.main import main

    file = run_file(toy, tmp_path)

    def fill(text: str) -> str:
        return text.format(tmp=tmp_path, file=file, target=toy.target)

    monkeypatch.setattr(sys, "argv", ["paceline", *map(fill, arguments)])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as ending:
        main()
    err = capfd.readouterr().err
    assert ending.value.code in (1, 2)
    assert "Traceback" not in err
    assert [part for part in map(fill, parts) if part not in err] == [], err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "run") == ["run.yaml"]
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_reader_that_leaves_early_is_no_error(toy: Toy) -> None:
    """`paceline inspect --json | head -1` ends quietly."""
    line = " ".join(["exec", *command("inspect", toy.data, "--json"), "|", "head", "-c", "20"])
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=PATIENCE_S, env=environment())
    assert result.stderr == ""
    assert result.stdout.startswith('{"row": 0')


def test_help_and_doctor_are_quick_and_honest() -> None:
    """--help lists the verbs, doctor --json has a check for each thing that training needs."""
    started = time.monotonic()
    assert "resume" in run("--help").stdout
    assert time.monotonic() - started < 20
    result = run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert {"python", "torch", "transformers", "cpu", "memory", "disk"} <= checks.keys()
    assert (result.returncode == 0) == all(check["ok"] for check in checks.values())
