"""What a feature cache is worth and what it costs: speed, disk, and what rounding does to losses and acceptance.

    python -m benchmarks.cache --target DIR --data DIR   # writes benchmarks/results/cache-cpu.json

Caches of one run in the target's own type, bfloat16 and fp8 are made; then the run is trained with the target and from
each of them, in turn, `--rounds` times, in the opposite order every other time. Losses are compared step by step with
those with the target; beside them stands what another seed does, which takes other batches. Wall-clock speed depends on
what else the machine does: the processor seconds of a token, in all threads, hardly do. Start-up and the first
`WARM_UP` steps are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.cpu import RESULTS
from paceline import __version__
from paceline.cli.cache import cache_features
from paceline.cli.progress import TrainProgress
from paceline.cli.train import run_training
from paceline.config import RunConfig, load_config
from paceline.data.dataset import Dataset
from paceline.train.feature_cache import CachedFeatures, find_damage

WARM_UP = 3
"""Steps that are not timed."""

BASE: dict[str, Any] = {
    "target.layer_ids": [2, 5, 8],
    "draft.num_layers": 2,
    "draft.block_size": 6,
    "draft.intermediate_size": 768,
    "draft.vocab": "observed",
    "data.epochs": 64,
    "data.max_length": 512,
    "data.validation": 0.1,
    "anchors.per_token": 0.125,
    "optim.lr": 2e-3,
    "optim.warmup_ratio": 0.1,
    "optim.tokens_per_step": 512,
    "pipeline.tokens_per_batch": 512,
    "checkpoint.every_steps": 100_000,
}
"""Keys of every run: those of the demo, with a drafter in float32."""

DTYPES = ("target", "bfloat16", "fp8")


class Clock(TrainProgress):
    """Collects the lines of the steps, with the times at which they came."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[dict[str, Any]] = []
        self.wall: list[float] = []
        self.processor: list[float] = []

    def step(self, line: dict[str, Any], total_steps: int) -> None:
        self.lines.append(line)
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())


def config_of(options: argparse.Namespace, folder: Path, **more: Any) -> RunConfig:
    """The run, in a folder of its own."""
    keys = BASE | {
        "run.dir": str(folder), "run.device": "cpu", "run.max_steps": options.steps, "target.path": options.target,
        "data.path": options.data, "eval.validate_every": options.steps,
    } | {key.replace("__", "."): value for key, value in more.items()}  # fmt: skip
    return load_config(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])


def made(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """The caches, what they took, and how fast they are read; the first time with checksums."""
    found = {}
    for dtype in DTYPES:
        started, processor = time.perf_counter(), time.process_time()
        record = cache_features(config_of(options, folder / "none"), folder / dtype, dtype)
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
        size = sum(shard["bytes"] for shard in record["shards"])
        assert find_damage(folder / dtype) == []
        cached = CachedFeatures(folder / dtype, torch.device("cpu"), torch.float32, with_last_hidden=False)
        reads = []
        for _ in range(4):
            begun = time.process_time()
            for row in range(record["num_rows"]):
                cached.row_features(row)
            reads.append(time.process_time() - begun)
        found[dtype] = {
            "dtype": record["dtype"],
            "bytes": size,
            "bytes_per_token": round(size / record["num_tokens"], 1),
            "relative_error": record["relative_error"],
            "made_in_s": round(seconds, 2),
            "made_in_processor_s": round(processor, 2),
            "first_read_mb_per_processor_s": round(size / reads[0] / 1e6),
            "later_reads_mb_per_processor_s": round(size / statistics.median(reads[1:]) / 1e6),
        }
    return found


def trained(options: argparse.Namespace, folder: Path, cache: Path | None, **more: Any) -> dict[str, Any]:
    """One run: its lines, and tokens by time."""
    clock = Clock()
    keys = {} if cache is None else {"target__cache": str(cache)}
    run_training(config_of(options, folder, **keys, **more), clock)
    lines = clock.lines
    # the last line comes after the measurement on held-out rows
    tokens = sum(line["tokens"] for line in lines[WARM_UP:-1])
    return {
        "losses": [line["loss"] for line in lines],
        "estimated": statistics.mean(line["acceptance_length_est"] for line in lines[-10:]),
        "held_out": lines[-1]["validation_acceptance_length"],
        "tok_per_s": tokens / (clock.wall[-2] - clock.wall[WARM_UP - 1]),
        "processor_ms_per_token": 1e3 * (clock.processor[-2] - clock.processor[WARM_UP - 1]) / tokens,
    }


def compared(run: dict[str, Any], online: dict[str, Any]) -> dict[str, Any]:
    """How a run differs from that with the target: losses step by step, and acceptance."""
    moved = [abs(a / b - 1) for a, b in zip(run["losses"], online["losses"], strict=True)]
    return {
        "last_loss": round(run["losses"][-1], 5),
        "same_bits": run["losses"] == online["losses"],
        "largest_change_of_a_loss": round(max(moved), 6),
        "mean_change_of_a_loss": round(statistics.mean(moved), 6),
        "mean_loss_of_last_10": round(statistics.mean(run["losses"][-10:]), 5),
        "estimated_acceptance_length_of_last_10": round(run["estimated"], 4),
        "held_out_acceptance_length": round(run["held_out"], 4),
        "held_out_change": round(run["held_out"] - online["held_out"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Training from a feature cache beside training with a target.")
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--data", required=True, help="folder that `paceline prepare` wrote for it")
    parser.add_argument("--steps", type=int, default=160, help="of each run")
    parser.add_argument("--rounds", type=int, default=2, help="times that each run is made")
    parser.add_argument("--out", type=Path, default=RESULTS / "cache-cpu.json")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    info = Dataset.open(options.data).info
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        caches = made(options, folder)
        runs: dict[str, list[dict[str, Any]]] = {}
        order: list[tuple[str, Path | None]] = [
            ("online", None),
            *((name, folder / name) for name in DTYPES),
        ]
        for number in range(options.rounds):
            for name, cache in order if number % 2 == 0 else order[::-1]:
                runs.setdefault(name, []).append(trained(options, folder / f"{name}-{number}", cache))
                print(f"{name}: {runs[name][-1]['tok_per_s']:.0f} tok/s", flush=True)
        other_seed = trained(options, folder / "seed", None, run__seed=1)
    online = runs["online"][0]
    how = f"--target DIR --data DIR --steps {options.steps} --rounds {options.rounds}"
    result = {
        "command": f"python -m benchmarks.cache {how}",
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)),
                    "load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2)},
        "versions": {"paceline": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "target": Path(options.target).name,
        "data": {"rows": info.num_rows, "tokens": info.num_tokens},
        "steps": options.steps,
        "caches": caches,
        "losses": {name: compared(found[0], online) for name, found in runs.items()}
        | {"online, another seed": compared(other_seed, online)},
        "speed": {
            name: {
                "tok_per_s": [round(run["tok_per_s"], 1) for run in found],
                "ratio_to_online": [
                    round(run["tok_per_s"] / beside["tok_per_s"], 2)
                    for run, beside in zip(found, runs["online"], strict=True)
                ],
                "processor_ms_per_token": [round(run["processor_ms_per_token"], 3) for run in found],
            }
            for name, found in runs.items()
        },
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
