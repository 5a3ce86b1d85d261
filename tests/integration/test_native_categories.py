"""A pretended driver, seen by py-spy with native frames: the categories' shares are what the program really did."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from paceline.profiling.classify import classify
from paceline.profiling.evidence import Frame, Stack
from paceline.profiling.statistics import wilson
from tests.programs import compiled_driver, running

PATIENCE_S = 60.0
POINTS = 0.05
"""Allowed beyond the 95 % interval, for a machine that is busy with other things."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``libcuda.so.1`` without a device, its internals stripped like the real one's."""
    return compiled_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def py_spy() -> str:
    """The program."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        pytest.skip("py-spy is not installed")
    return found


def record(py_spy: str, pid: int, folder: Path) -> dict[str, Counter[str]]:
    """Samples by category for each thread's name, over two seconds."""
    file = folder / "stacks.raw"
    command = [py_spy, "record", "--native", "--idle", "-r", "50", "-d", "2", "-f", "raw", "-t", "-o", str(file)]
    done = subprocess.run([*command, "-p", str(pid)], capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode != 0:
        pytest.skip(f"py-spy cannot attach here: {done.stderr.strip().splitlines()[-1:]}")
    threads: dict[str, Counter[str]] = {}
    for line in file.read_text().splitlines():
        folded, _, count = line.rpartition(" ")
        thread, *frames = folded.split(";")
        name = thread.partition(": ")[2]
        stack = Stack(level="4", pid=pid, tid=1, frames=tuple(map(frame_of, frames)))
        threads.setdefault(name, Counter())[classify(stack).category] += int(count)
    return threads


def frame_of(text: str) -> Frame:
    """``name (file:line)``, as py-spy writes it."""
    found = re.fullmatch(r"(.*) \((.*?)(?::(\d+))?\)", text)
    if found is None:
        return Frame(name=text, is_native=True)
    name, file, line = found.groups()
    return Frame(name=name, file=file, line=int(line or 0), is_native=not file.endswith(".py"))


def is_share(count: int, samples: int, truth: float) -> bool:
    """Whether that many of so many samples may come from this share."""
    low, high = wilson(count, samples)
    return samples > 50 and low - POINTS <= truth <= high + POINTS


def test_launches_and_waits_are_found_in_their_true_shares(driver: Path, py_spy: str, tmp_path: Path) -> None:
    """A thread that launches for 80 % of its time and waits for 20 % is seen to do just that."""
    with running("fake_cuda.py", str(driver), "0.8", "mixed") as process:
        mixed = record(py_spy, process.pid, tmp_path)["mixed"]
        process.kill()
        assert process.stdout is not None
        truth = float(re.findall(r"share (\d\.\d{4})\n", process.stdout.read())[-1])
    samples = mixed.total()
    assert is_share(mixed["sync"], samples, 1 - truth), (mixed, truth)
    assert is_share(samples - mixed["sync"], samples, truth), (mixed, truth)
    assert mixed["launch"] > 0.9 * (samples - mixed["sync"] - mixed["gil_wait"] - mixed["python"]), mixed
    assert mixed["launch"] > 0.6 * samples, mixed


def test_pure_waits_frees_copies_and_a_full_queue_are_told_apart(driver: Path, py_spy: str, tmp_path: Path) -> None:
    """Each thread does one thing, and a free that ends in a wait is the allocator's."""
    threads = "waiting,freeing,copying,queueing"
    with running("fake_cuda.py", str(driver), "0", threads) as process:
        seen = record(py_spy, process.pid, tmp_path)
    wanted = {"waiting": "sync", "freeing": "allocator_churn", "copying": "sync", "queueing": "launch_queue_full"}
    for name, category in wanted.items():
        assert is_share(seen[name][category], seen[name].total(), 1.0), (name, seen[name])
    assert seen["MainThread"].keys() <= {"sleep", "gil_wait", "python", "io"}


def test_a_victim_of_the_gil_waits_for_it_and_the_hog_runs_python(py_spy: str, tmp_path: Path) -> None:
    """Beside a thread that keeps the GIL, another one's short Python is mostly waiting for it."""
    with running("gil_hog.py", "1.0") as process:
        seen = record(py_spy, process.pid, tmp_path)
    assert seen["victim"]["gil_wait"] > 0.5 * seen["victim"].total(), seen
    assert seen["hog"]["python"] > 0.8 * seen["hog"].total(), seen


@pytest.mark.parametrize(
    "program",
    [("train_loop.py",), pytest.param(("matmul.py", "torch"), marks=pytest.mark.slow), ("matmul.py", "numpy")],
)
def test_little_of_real_work_is_unmatched(program: tuple[str, ...], py_spy: str, tmp_path: Path) -> None:
    """Training and multiplying matrices on the CPU are computing, and rules know nine tenths of it or more."""
    pytest.importorskip("torch")
    with running(*program) as process:
        seen = record(py_spy, process.pid, tmp_path)
    work = seen["matmul" if "matmul" in seen else "MainThread"]
    assert work["compute"] > 0.5 * work.total(), work
    assert work["other"] < 0.1 * work.total(), work
