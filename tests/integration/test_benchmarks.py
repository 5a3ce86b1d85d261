"""The benchmarks run; their timings decide nothing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import packing, peers, timing
from benchmarks.cpu import main


def test_the_cpu_benchmark_runs(tmp_path: Path) -> None:
    """At tiny shapes it writes every figure, with the command that made them."""
    result = main(["--small", "--out", str(tmp_path / "cpu.json")])
    assert (tmp_path / "cpu.json").is_file()
    assert result["command"].startswith("python -m benchmarks --small")
    assert min(result["target_tok_per_s"], result["drafter_tok_per_s"], result["blocks_per_s"]) > 0


def test_the_packing_benchmark_runs(tmp_path: Path) -> None:
    """On few rows it writes every figure, with the command that made them."""
    result = packing.main(["--rows", "2000", "--out", str(tmp_path / "packing.json")])
    assert (tmp_path / "packing.json").is_file()
    assert result["command"] == f"python -m benchmarks.packing --rows 2000 --out {tmp_path / 'packing.json'}"
    assert result["opening"]["open_s"] > 0
    assert min(mix["fill"] for mix in result["planning"].values()) > 0.9
    assert result["first start"]["batches"] == result["next start"]["batches"] > 0


def test_a_step_is_timed() -> None:
    """First calls, warm-up and counted steps are apart, every counted step has its time, the last loss is there."""
    losses = iter(range(1, 1_000_000))
    result = timing.measure(lambda: torch.tensor(float(next(losses))), 0.02, 0.01, device="cpu", compile_calls=3)
    assert len(result["compile_s"]) == 3
    assert result["steps"] == len(result["ms"]) >= 5
    assert result["loss"][0] == 3 + result["warmup_steps"] + 1
    assert result["loss"][1] == result["loss"][0] + result["steps"] - 1
    assert result["p10_ms"] <= result["median_ms"] <= result["p90_ms"]


def test_a_loss_that_is_not_finite_ends_the_benchmark() -> None:
    """Numbers that are not finite draw less power, so their times are refused."""
    with pytest.raises(FloatingPointError, match="the loss of step 0 is nan"):
        timing.measure(lambda: float("nan"), 0.0, 0.0, device="cpu")


@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_a_peer_steps(name: str) -> None:
    """Where its wheel is installed, a peer takes steps whose loss starts near the logarithm of the vocabulary."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    shape = peers.SHAPES["tiny"]
    step = {"specforge": peers.SpecForgeStep, "speculators": peers.SpeculatorsStep}[name]
    options = {} if name == "specforge" else {"loss": "eager"}
    peer = step(shape, "cpu", torch.bfloat16, compiled=False, **options)
    feed = peers.Feed(peer, [peers.make_rows(shape, "cpu", torch.bfloat16, seed=0)])
    first = float(feed())
    assert 3.0 < first < 6.0
    assert min(float(feed()) for _ in range(20)) < first
    peer.check_finite()
