"""The benchmarks run; their timings decide nothing."""

from __future__ import annotations

from pathlib import Path

from benchmarks import packing
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
