"""What the doctor says of machines that lack something."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline.cli import doctor, trials
from paceline.cli.main import app
from paceline.dflash.anchors import make_anchors
from paceline.kernels import compiled, flex
from paceline.kernels.attention import BlockLayout, attend_dense

Usage = namedtuple("Usage", "total used free")


def found(quick: bool = True) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in doctor.run_checks(quick)}


def test_this_machine_can_run_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON is all of stdout; a state for each line; the file that is written is gone."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    record = json.loads(result.stdout)
    names = {check["name"] for check in record["checks"]}
    assert {"python", "torch", "transformers", "cpu", "ray", "memory", "open files", "disk", "disk speed"} <= names
    assert all(check["state"] in ("ok", "warn", "fix") for check in record["checks"])
    assert all(check["fix"] for check in record["checks"] if check["state"] != "ok")
    assert (result.exit_code == 0) == record["ok"] and not list(tmp_path.iterdir())
    assert "disk speed" not in found() and "compile" not in found()


def test_what_is_needed_and_missing_is_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old or missing package, little memory and little space end with exit code 1; the rest is still told."""
    versions = {"torch": "2.9.1+cpu", "transformers": None}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(2**40, 2**40, 2**29))
    checks = found()
    for name in ("torch", "transformers", "disk"):
        assert checks[name]["state"] == "fix" and checks[name]["fix"]
    assert checks["torch"]["fix"] == "pip install 'torch>=2.11,<2.15'" and checks["torch"]["seen"] == "2.9.1+cpu"
    result = CliRunner().invoke(app, ["doctor", "--quick"])
    assert result.exit_code == 1 and "fix  disk" in result.stdout


def test_what_is_only_less_good_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little shared memory, few open files, a driver without a GPU for torch, a slow disk: the demo still works."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(1, 1, 2**26 if str(place) == "/dev/shm" else 2**40))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    checks = found()
    for name in ("shared memory", "open files", "cuda"):
        assert checks[name]["state"] == "warn" and checks[name]["fix"]
    assert checks["open files"]["fix"] == "ulimit -n 4096"
    monkeypatch.setattr(doctor, "SLOW_DISK_MB_PER_S", 1e9)
    monkeypatch.setattr(doctor, "WRITTEN_BYTES", 1 << 20)
    assert doctor._disk_speed()["state"] == "warn"


def test_a_folder_that_cannot_be_written_is_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the system says of it."""

    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    check = doctor._disk_speed()
    assert check["state"] == "fix" and "Permission denied" in check["seen"]


def test_kernels_are_tried_once_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What works, what fails and what hangs; the answer is kept for this card, driver and torch."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command[-1])
        if command[-1] == "graphs":
            raise subprocess.TimeoutExpired(command, doctor.TRIAL_S)
        return subprocess.CompletedProcess(command, int(command[-1] == "flex"), "", "Traceback\nNoTriton: not here\n")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    for _ in range(2):
        checks = {check["name"]: check for check in doctor._trials()}
        assert checks["compile"]["state"] == "ok"
        assert (
            "NoTriton: not here" in checks["flex"]["seen"] and "kernels.attention=per_document" in checks["flex"]["fix"]
        )
        assert "more than 30 s" in checks["graphs"]["seen"]
    assert asked == ["compile", "flex", "graphs"]
    (tmp_path / "doctor.json").write_text("[]")
    doctor._trials()
    assert len(asked) == 6


def test_a_trial_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is really started; without a GPU it fails with a reason."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "CUDA" in doctor._tried("compile") or "NVIDIA" in doctor._tried("compile")
    assert sys.executable and set(doctor.TRIALS) == {"compile", "flex", "graphs"}


def test_the_trial_of_attention_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU by the reference in both places it passes, and with a wrong result it does not."""
    layout = BlockLayout.of_row(make_anchors(torch.arange(16) * 16), (0, 256), 16, 256)
    monkeypatch.setattr(BlockLayout, "update", lambda self, *args: None, raising=False)
    monkeypatch.setattr(flex, "BlockMasks", lambda *args: layout)
    monkeypatch.setattr(flex, "attend_flex", attend_dense)
    monkeypatch.setattr(compiled, "run_compiled", lambda function, *args: function(*args))
    trials.flex("cpu")
    monkeypatch.setattr(flex, "attend_flex", lambda *args: attend_dense(*args) * 1.1)
    with pytest.raises(AssertionError):
        trials.flex("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", doctor.TRIALS)
def test_trials_pass_on_a_gpu(name: str) -> None:
    """Each within its time, in a process of its own."""
    assert doctor._tried(name) == ""
