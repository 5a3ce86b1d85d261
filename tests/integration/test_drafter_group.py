"""Drafters that update together as processes of their own: gloo on the CPU, NCCL on GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.train.group import Group
from tests import drafter_rank, tiny

GPUS = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=GPUS)]
WIDE = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def start(rank: int, folder: Path, device: str, port: int = 0, **more: Any) -> subprocess.Popen[str]:
    settings = {
        "rank": rank, "size": 2, "port": port, "folder": str(folder / "target"), "out": str(folder / f"rank-{rank}"),
        "device": device if device == "cpu" else f"{device}:{rank}", "dtype": "float32", "graphs": "off",
        "shards": False, "timeout_s": 120.0, "stops_after": None,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.drafter_rank", json.dumps(settings | more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def start_both(folder: Path, device: str, **more: Any) -> list[subprocess.Popen[str]]:
    tiny.save(tiny.causal_lm("llama", **WIDE), folder / "target")
    first = start(0, folder, device, **more)
    assert first.stdout is not None
    port = int(first.stdout.readline())
    return [first, start(1, folder, device, port, **more)]


def finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def found_by(folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / f"rank-{rank}.json").read_text()), load_file(folder / f"rank-{rank}.safetensors")


@pytest.mark.parametrize(
    ("device", "dtype", "graphs", "shards"),
    [
        pytest.param("cpu", "float32", "off", True, marks=pytest.mark.slow),
        pytest.param("cuda", "float32", "off", False, marks=GPUS),
        pytest.param("cuda", "float32", "off", True, marks=GPUS),
        pytest.param("cuda", "bfloat16", "off", False, marks=GPUS),
        pytest.param("cuda", "bfloat16", "on", False, marks=GPUS),
    ],
)
def test_processes_train_as_one(tmp_path: Path, device: str, dtype: str, graphs: Any, shards: bool) -> None:
    """Two processes have the losses and weights of one that does it all, within the rounding of the type."""
    processes = start_both(tmp_path, device, dtype=dtype, graphs=graphs, shards=shards)
    try:
        assert [process.wait(400) for process in processes] == [0, 0]
    finally:
        finish(processes)
    (first, weights), (second, others) = found_by(tmp_path, 0), found_by(tmp_path, 1)
    assert first["results"] == second["results"] and len(first["results"]) == drafter_rank.NUM_STEPS
    assert first["graphs"] == ("replayed from a CUDA graph" if graphs == "on" else "launched kernel by kernel")
    place, kind = torch.device(device, *([0] if device == "cuda" else [])), getattr(torch, dtype)
    torch.backends.cuda.matmul.allow_tf32 = False
    target, features = drafter_rank.make_features(tmp_path / "target", place, kind)
    alone = drafter_rank.make_step(target, Group(), place, kind)
    wanted = drafter_rank.train(alone, features)
    exact = dtype == "float32"
    for one, other in zip(first["results"], wanted, strict=True):
        assert one["is_finite"] and one["loss"] == pytest.approx(other["loss"], rel=1e-5 if exact else 1e-2)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4 if exact else 5e-2)
    for name, weight in others.items():
        assert torch.equal(weights[name], weight)
        assert torch.equal(weights[f"master.{name}"].to(kind).float(), weight)
        master = alone.optimizer.masters[name].cpu()
        difference = (weights[f"master.{name}"] - master).norm() / master.norm()
        assert float(difference) < (1e-5 if exact else 1e-2), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["hangs", "is killed"])
def test_a_rank_that_goes_is_an_error_of_the_other(tmp_path: Path, device: str, how: str) -> None:
    """Its process goes on and says so, after the timeout at the latest; it is not torn down, nor does it hang."""
    tiny.save(tiny.causal_lm("llama", **WIDE), tmp_path / "target")
    timeout_s = 60.0 if device == "cuda" or how == "is killed" else 8.0  # a GPU compiles at first
    first = start(0, tmp_path, device, timeout_s=timeout_s)
    assert first.stdout is not None
    other = start(1, tmp_path, device, int(first.stdout.readline()), timeout_s=600.0, stops_after=2)
    try:
        assert other.stdout is not None and other.stdout.readline() == "stops\n"
        if how == "is killed":
            other.kill()
        started = time.monotonic()
        assert first.wait(120) == 3
        at_once = device == "cpu" and how == "is killed"  # NCCL within a host does not notice
        assert time.monotonic() - started < (10.0 if at_once else timeout_s + 15.0)
        assert "drafter-0 waited for the other drafters in vain" in first.stdout.read()
    finally:
        finish([first, other])
