"""The benchmarks run; their timings decide nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import packing, peers, shapes, step, timing
from benchmarks.cpu import main

ROOT = Path(__file__).parents[2]


def test_the_cpu_benchmark_runs(tmp_path: Path) -> None:
    """At tiny shapes it writes every figure, with the command that made them."""
    result = main(["--small", "--out", str(tmp_path / "cpu.json")])
    assert (tmp_path / "cpu.json").is_file()
    assert result["command"].startswith("python -m benchmarks --small")
    assert min(result["target_tok_per_s"], result["drafter_tok_per_s"], result["blocks_per_s"]) > 0


def test_the_packing_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On few rows it writes every figure, with the command that made them; the first one from a process of its own."""
    apart, parts = packing._apart, []

    def first_apart(work: Any, *arguments: Any) -> Any:
        parts.append(work)
        return apart(work, *arguments) if len(parts) == 1 else work(*arguments)

    monkeypatch.setattr(packing, "_apart", first_apart)
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


def test_the_headline_compares_like_with_like() -> None:
    """Ratios are of the faster of our own cases, with the target in both, ragged rows by useful tokens."""
    cases = {
        "qwen3-8b": {"ms_per_step": 800.0, "tok_per_s": 15e3, "share_of_matmul": 0.8, "attention": "flex"},
        "qwen3-8b-flash4": {"ms_per_step": 750.0, "tok_per_s": 16e3, "share_of_matmul": 0.85, "attention": "flash4"},
        "qwen3-8b-uniform": {"ms_per_step": 760.0, "tok_per_s": 15.5e3},
        "qwen3-8b-chat": {"failed": "OutOfMemoryError"},
        "smollm2-135m": {"ms_per_step": 25.0, "tok_per_s": 320e3},
        "smollm2-135m-eager": {"ms_per_step": 65.0, "tok_per_s": 120e3},
    }
    peers = {
        "specforge": {
            "options": [
                {"settings": {"liger": False, "chunk_blocks": 128}, "median_ms": 950.0},
                {"settings": {"liger": True, "chunk_blocks": 128}, "error": "RuntimeError"},
                {"settings": {"liger": True, "chunk_blocks": 0}, "median_ms": 800.0},
            ],
            "drafter": {"median_ms": 800.0},
            "with_target": {"median_ms": 1200.0, "tok_per_s": 10e3},
            "ragged_with_target": {"median_ms": 1800.0, "tok_per_s": 5e3},
        },
        "speculators": {"failed": "RuntimeError"},
    }
    head = step.headline(cases, peers)
    assert (head["ms_per_step"], head["attention"]) == (750.0, "flash4")
    assert head["ragged"] == {"tok_per_s": 15.5e3, "chat_tok_per_s": None}
    assert head["small"] == {"tok_per_s": 320e3, "speedup_vs_eager": 2.6}
    forge = {"ms_per_step": 1200.0, "tok_per_s": 10e3, "ratio": 1.6, "ragged_ratio": 3.1, "defaults_ratio": 1.8}
    assert head["peers"] == {"specforge": forge}
    assert step.headline({}, {}) == {}


def test_peers_run_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails leaves the last line of its errors, and the other's result is kept."""
    commands = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if "specforge" in command:
            return subprocess.CompletedProcess(command, 1, None, "Traceback\n  ...\nOutOfMemoryError: 9.27 GiB\n")
        result = {"speculators": {"with_target": {"median_ms": 1.0}}, "stubs": ["openai"]}
        Path(command[command.index("--out") + 1]).write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0, None, "a warning")

    monkeypatch.setattr(step.subprocess, "run", run)
    found = step.run_peers(["specforge", "speculators"], torch.device("cpu"), 1.0, 0.5)
    assert [command[:5] for command in commands] == [
        [sys.executable, "-m", "benchmarks.peers", "--peers", name] for name in ("specforge", "speculators")
    ]
    assert found["specforge"] == {"failed": "OutOfMemoryError: 9.27 GiB"}
    assert found["speculators"] == {"with_target": {"median_ms": 1.0}}
    assert found["stubs"] == ["openai"] and "torch" in found["versions"]


def test_a_peer_that_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is really started, with arguments that it takes; where the wheel is installed it is timed."""
    monkeypatch.chdir(ROOT)
    found = step.run_peers(["speculators"], torch.device("cpu"), 0.01, 0.0)["speculators"]
    if find_spec("speculators") is None:
        assert found == {"failed": "ModuleNotFoundError: No module named 'speculators'"}
    else:
        assert found["with_target"]["median_ms"] > 0


def test_the_step_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU at a tiny shape it trains a drafter of each kind, and writes what it timed."""
    out, names = tmp_path / "step.json", ["tiny", "tiny-recompute", "tiny-dflash2", "tiny-dspark"]
    options = ["--cases", *names, "--device", "cpu", "--out", str(out), "--seconds", "0.01", "--warmup", "0"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.step", *options])
    step.main()
    cases = json.loads(out.read_text())["cases"]
    assert cases["tiny"]["loss"][1] < cases["tiny"]["loss"][0]
    assert all(cases[name]["tok_per_s"] > 0 and cases[name]["useful_tflop"] > 0 for name in names)
    assert str(tmp_path) not in out.read_text()


def test_work_is_counted_as_it_is_done() -> None:
    """The work unit is 434.6 TFLOP by the method, of which 6.7 are left out exactly; fp8 does the same work."""
    draft = shapes.draft_shape(shapes.target_shape(shapes.qwen3_8b()), (1, 9, 17, 25, 33))
    counts = {"tokens": 12_288.0, "predictions": 2048.0 * 15}
    done = step.useful_flop(step.WORK_UNIT, draft, counts)
    assert done / 1e12 == pytest.approx(434.6 - 6.7, abs=0.1)
    fp8 = next(case for case in step.CASES if case.name == "qwen3-8b-fp8")
    assert step.useful_flop(fp8, draft, counts) == done
    half = step.useful_flop(step.WORK_UNIT, draft, counts | {"predictions": 2048.0 * 7.5})
    assert done - half == pytest.approx(4 * 4096 * 151_936 * 2048 * 7.5)


@pytest.mark.slow
def test_a_planted_fault_is_looked_at_and_judged_again(tmp_path: Path) -> None:
    """A run with a sleeping drafter, looked at from outside, the fault removed, and the saved look judged again."""
    out, keep = tmp_path / "faults.json", tmp_path / "keep"
    keep.mkdir()
    arguments = ["--device", "cpu", "--cases", "slow-drafter", "--seconds", "3", "--keep", str(keep), "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.faults"]
    done = subprocess.run([*command, *arguments, "--native-seconds", "5"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["cases"]["slow-drafter"]
    assert "error" not in found, found
    assert found["kind"] in ("consumer-bound", "undecided") and "sleep" in found["supported"]
    assert found["gain_measured"] > 1.0
    again = subprocess.run(
        [*command, "--judge", str(out), "--keep", str(keep)], cwd=ROOT, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(out.read_text())["cases"]["slow-drafter"]["line"] == found["line"]
