"""A run that cannot be lost: the short version of `benchmarks.chaos`, and the harness behind it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.chaos.harness import Bits, Ended, digests
from tests.chaos.ray_trials import actors_of, not_close, processes_of
from tests.chaos.trials import ENDS, FAULTS, HANG, OTHER_END, REFUSED, TRACEBACK, judge

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
TRACE = "Traceback (most recent call last):\n"


def run_chaos(folder: Path, *options: str) -> dict[str, Any]:
    """The result of a fresh interpreter: children are forked from it, which this one has too many threads for."""
    out = folder / "chaos.json"
    command = [sys.executable, "-m", "benchmarks.chaos", "--folder", str(folder / "chaos"), "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert out.exists(), done.stdout + done.stderr
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    result["output"] = done.stdout + done.stderr
    return result


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_chaos(tmp_path_factory.mktemp("chaos"), "--short")


def test_a_save_that_is_struck_at_any_change_loses_nothing(short: dict[str, Any]) -> None:
    """Wherever a crash, power cut or error comes, the old or the new checkpoint is whole, and the run goes on."""
    (save,) = short["saves"]
    assert save["num_problems"] == 0, save["problems"]
    assert save["fates"]["before"] == save["changes"] >= 25
    assert {"before", "after", "torn", "power cut", "ENOSPC", "EIO"} <= save["fates"].keys()
    assert {"open", "write", "fsync", "rename", "replace", "symlink", "unlink", "rmdir", "mkdir"} <= save[
        "operations"
    ].keys()


def test_a_run_that_is_struck_at_random_ends_with_the_same_bits(short: dict[str, Any]) -> None:
    """Killed, stopped, frozen, starved or without a disk, a run that is resumed is the undisturbed one; none hangs."""
    bugs = [trial for trial in short["trials"] if trial["is_bug"]]
    assert not bugs, short["output"]
    assert short["hangs"] == 0 and short["num_trials"] >= 20
    assert all(row["trials"] for row in short["table"].values()) and short["table"].keys() == FAULTS.keys()
    assert short["num_strikes"] - short["num_late_strikes"] >= short["num_trials"] // 2
    assert short["longest_stop_s"] < 30.0


def test_the_harness_finds_what_it_looks_for(short: dict[str, Any]) -> None:
    """A save that does not sync loses a checkpoint in a power cut, and a process that hangs is seen with its stacks."""
    assert short["harness"]["problems_without_sync"] > 0
    assert short["harness"]["finds_a_hang"]


@pytest.mark.slow
def test_a_hundred_runs_and_every_change(tmp_path: Path) -> None:
    """The long version: 100 trials."""
    result = run_chaos(tmp_path, "--trials", "100", "--seed", "1", "--no-saves")
    assert result["bugs"] == 0, result["output"]
    assert result["num_trials"] == 100


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_ray_that_is_struck_ends_with_the_same_bits(tmp_path: Path) -> None:
    """One trial: a target's process is killed, and weights, moments and losses are those of the undisturbed run."""
    result = run_chaos(tmp_path, "--ray", "--trials", "1")
    assert result["bugs"] == 0 and result["outcomes"] == {"same bits": 1}, result["output"]
    assert sum(result["strikes"].values()) >= 1
    assert result["longest_left_s"] < 20.0


@pytest.mark.parametrize(
    ("ended", "fault", "is_finished", "outcome"),
    [
        (Ended(0, ""), "SIGTERM", False, None),
        (Ended(None, ""), "SIGTERM", False, HANG),
        (Ended(1, TRACE + "paceline: no space"), "ENOSPC", False, TRACEBACK),
        (Ended(1, "paceline: no space"), "ENOSPC", False, REFUSED),
        (Ended(1, "paceline: no space"), "SIGINT", False, OTHER_END),
        (Ended(1, ""), "ENOSPC", False, OTHER_END),
        (Ended(-15, ""), "SIGTERM", False, OTHER_END),
        (Ended(-15, ""), "SIGTERM", True, None),
        (Ended(-9, ""), "SIGKILL", False, None),
        (Ended(-9, ""), "SIGSTOP, SIGCONT", False, OTHER_END),
        (Ended(-11, ""), "SIGKILL", False, OTHER_END),
    ],
)
def test_an_ending_is_judged(ended: Ended, fault: str, is_finished: bool, outcome: str | None) -> None:
    """Only what a fault explains passes: its own exit code, a reason for a full disk, or a good end."""
    assert judge(ended, fault, is_finished) == outcome
    assert fault in FAULTS and ENDS.keys() < FAULTS.keys()


def test_bits_that_differ_are_named(tmp_path: Path) -> None:
    """A tensor with one other bit, a lost line and another loss are each found."""
    tensors = {"a": torch.zeros(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "one")
    tensors["b"][1] = torch.nextafter(tensors["b"][1], torch.tensor(2.0, dtype=torch.bfloat16))
    save_file(tensors, tmp_path / "two")
    one, two = digests(tmp_path / "one"), digests(tmp_path / "two")
    lines = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert Bits(one, lines).difference(Bits(dict(one), list(lines))) is None
    assert Bits(one, lines).difference(Bits(two, lines)) == "tensor b"
    assert Bits(one, lines).difference(Bits(one, lines[:1])) == "2 and 1 metrics lines"
    assert "step 2" in (Bits(one, lines).difference(Bits(one, [lines[0], {"step": 2, "loss": 0.3}])) or "")


def test_losses_may_differ_by_another_order_of_sums_alone() -> None:
    """A loss within 1e-4 passes; one further off, another batch and a lost line are named."""
    line = {"step": 1, "batch": 4, "loss": 2.0, "grad_norm": 1.0, "acceptance_length_est": 1.5}
    straight = Bits({}, [line])
    assert not_close(Bits({}, [line | {"loss": 2.0001}]), straight) is None
    assert "loss of step 1" in (not_close(Bits({}, [line | {"loss": 2.0003}]), straight) or "")
    assert "batch of step 1" in (not_close(Bits({}, [line | {"batch": 5}]), straight) or "")
    assert not_close(Bits({}, []), straight) == "0 and 1 metrics lines"


def test_processes_of_a_run_are_found_by_their_output(tmp_path: Path) -> None:
    """An actor by its log, and what belongs to a cluster by its folder, which is named after the driver."""
    session = tmp_path / "session_2026-11-30_12-00-00_000000_99999999" / "logs"
    logs = tmp_path / "run" / "logs"
    session.mkdir(parents=True)
    logs.mkdir(parents=True)
    sleepers = []
    for file in (logs / "target-1.log", session / "raylet.out"):
        with file.open("w") as output:
            sleepers.append(subprocess.Popen(["sleep", "60"], stdout=output))
    try:
        found = dict(processes_of(tmp_path / "run", [99999999]))
        assert found == {sleepers[0].pid: "target-1", sleepers[1].pid: "of the cluster"}
        assert dict(processes_of(tmp_path / "run", [9999999])) == {sleepers[0].pid: "target-1"}
        assert actors_of(tmp_path / "run", "target") == [sleepers[0].pid]
        assert actors_of(tmp_path / "run", "drafter") == []
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


PROGRAM = """
import os, sys
from pathlib import Path
from tests.chaos.points import hook
folder, index, fate = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
seen = []
def decide(operation):
    seen.append(str(operation))
    return None if len(seen) - 1 != index else int(fate) if fate.isdecimal() else fate
hook(folder, decide)
(folder / "new").mkdir()
with open(folder / "new" / "kept", "w") as file:
    file.write("abcd")
    os.fsync(file.fileno())
descriptor = os.open(folder / "new", os.O_RDONLY); os.fsync(descriptor); os.close(descriptor)
(folder / "new" / "lost").write_text("efgh")
os.rename(folder / "new", folder / "place")
print("|".join(seen))
"""
CHANGES = [
    "mkdir new", "open new/kept", "write new/kept", "fsync new/kept", "fsync new", "open new/lost", "write new/lost",
    "rename place",
]  # fmt: skip


def strike(folder: Path, index: int, fate: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(index), fate]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_change_is_seen_in_order(tmp_path: Path) -> None:
    """By way of `os`, `open` and `pathlib`."""
    assert strike(tmp_path, -1, "before").stdout.strip().split("|") == CHANGES


@pytest.mark.parametrize(
    ("fate", "left"),
    [
        ("before", {"new": None, "new/kept": "abcd", "new/lost": ""}),
        ("torn", {"new": None, "new/kept": "abcd", "new/lost": "ef"}),
        ("after", {"new": None, "new/kept": "abcd", "new/lost": "efgh"}),
    ],
)
def test_a_write_is_struck(tmp_path: Path, fate: str, left: dict[str, str | None]) -> None:
    """Before it nothing is there, torn a half, after it all; and the process is dead."""
    assert strike(tmp_path, CHANGES.index("write new/lost"), fate).returncode == 137
    assert contents(tmp_path) == left


def test_a_power_cut_takes_what_was_not_synced(tmp_path: Path) -> None:
    """A rename and a file without fsync are gone; what was synced stays, under the name that it had."""
    assert strike(tmp_path, CHANGES.index("rename place"), "power cut").returncode == 137
    assert contents(tmp_path) == {"new": None, "new/kept": "abcd"}


def test_an_error_is_raised_after_half_a_write(tmp_path: Path) -> None:
    """As a disk that fills up takes a part first."""
    done = strike(tmp_path, CHANGES.index("write new/lost"), str(errno.ENOSPC))
    assert done.returncode == 1 and os.strerror(errno.ENOSPC) in done.stderr
    assert contents(tmp_path)["new/lost"] == "ef"


def contents(folder: Path) -> dict[str, str | None]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8") if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
