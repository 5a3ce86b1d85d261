"""The command as a person or a script meets it: messages, exit codes, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from paceline.config import dump_config
from paceline.models.target import Target
from tests.toy import Toy

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paceline", *map(str, arguments)]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def run(*arguments: object, cwd: Path = ROOT) -> CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, env=environment(), cwd=cwd
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., CompletedProcess[str]]:
    """`run` in this process, which has imported everything."""
    from paceline.cli.main import run as command_line

    def run_here(*arguments: object) -> CompletedProcess[str]:
        capfd.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ending:
            patch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
            patch.setenv("HF_HUB_OFFLINE", "1")
            patch.setenv("COLUMNS", "200")
            command_line()
        shown = capfd.readouterr()
        return CompletedProcess(sys.argv, int(ending.value.code or 0), shown.out, shown.err)

    return run_here


def run_file(toy: Toy, folder: Path, *overrides: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(dump_config(toy.config(folder / "run", *overrides)))
    return path


def test_train_resume_and_export_from_the_command_line(
    toy: Toy, tmp_path: Path, here: Callable[..., CompletedProcess[str]]
) -> None:
    """A run trains in a process of its own, is gone on with by `train`, `resume` finds nothing left, and it exports."""
    file = run_file(toy, tmp_path, "run.max_steps=4")
    first = run("train", file, "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["ending"] == "finished"
    again = here("train", file)
    assert again.returncode == 0 and "finished at step 4 of 4" in again.stdout
    resumed = here("resume", tmp_path / "run", "--json")
    assert resumed.returncode == 0 and json.loads(resumed.stdout)["tokens"] == 0
    exported = here("export", tmp_path / "run", "--format", "zlab", "--out", tmp_path / "export")
    assert exported.returncode == 0 and '"num_speculative_tokens": 3' in exported.stdout
    assert (tmp_path / "export" / "config.json").is_file()


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    toy: Toy, tmp_path: Path, here: Callable[..., CompletedProcess[str]]
) -> None:
    """--dry-run resolves every auto, shows the memory by part, and makes no run folder."""
    result = here("train", run_file(toy, tmp_path), "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert plan["config"]["draft"]["mask_token_id"] == 267
    assert plan["plan"]["steps"] > 0 and plan["memory"]["total_gib"] > 0
    assert not (tmp_path / "run").exists()


def test_a_failing_role_ends_with_its_traceback_and_exit_code_1(
    toy: Toy, tmp_path: Path, here: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role's failure prints the original traceback, then role and batch."""

    def features(self: Target, *_: object) -> None:
        raise RuntimeError("toy failure 7")

    monkeypatch.setattr(Target, "features", features)
    result = here("train", run_file(toy, tmp_path))
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "toy failure 7" in result.stderr
    said, where = result.stderr.splitlines()[-2:]
    assert said.startswith("paceline: target-0 failed 3 times on batch 0") and where.startswith("target-0 ran on cpu")


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
    here: Callable[..., CompletedProcess[str]],
) -> None:
    """Each mistake gives a message with what was seen and what to do, no traceback, and nothing half-written."""
    file = run_file(toy, tmp_path)

    def fill(text: str) -> str:
        return text.format(tmp=tmp_path, file=file, target=toy.target)

    result = here(*map(fill, arguments))
    err = result.stderr
    assert result.returncode in (1, 2)
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
    assert (result.returncode == 0) == all(check["state"] != "fix" for check in checks.values())
