"""What profiling costs: the same training steps without a page, with profiling off, and with everything on, in turns.

    python -m benchmarks.profiling --out benchmarks/results/profiling-h200.json     # 135M, CUDA graphs: most sensitive
    python -m benchmarks.profiling --case tiny --device cpu --blocks 4              # does it run?

Steps run as `paceline train` runs them on one device: target and drafter in turn, results read one step late. An arm
is a block of steps that ends with a wait for the device; arms follow one another in an order drawn anew each round, so
that drift of clocks and of the machine falls on all alike. `on` counts every stage, times one batch in eight on the
device, and prints and writes a table every second; `off` is a run that could be switched on; `absent` has no page.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.step import CASES, Bench
from paceline import __version__
from paceline.pipeline.coordinator import Coordinator
from paceline.pipeline.local import InTurn
from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.live import Reporter
from paceline.records import FeatureBatch

ARMS = ("absent", "off", "on")
INTERVAL_S = 1.0


class Steps:
    """Training steps of a case, one after another."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._stream = self._features()
        self._pending: list[Any] = []

    def run(self, count: int) -> float:
        """Milliseconds a step, the device's work included."""
        wait = torch.cuda.synchronize if self.bench.device.type == "cuda" else (lambda: None)
        wait()
        started = time.perf_counter()
        for _ in range(count):
            features = next(self._stream)
            stages.next_batch(features.tokens.number)
            self.bench.trainer.accumulate(features)
            self._pending.append(self.bench.trainer.update(self.bench.count))
            self.bench.count += 1
            if len(self._pending) > self.bench.trainer.depth:
                self._pending.pop(0).read()
        wait()
        return 1e3 * (time.perf_counter() - started) / count

    def _features(self) -> Iterator[FeatureBatch]:
        rows = self.bench.rows

        def make_features(number: int) -> FeatureBatch:
            return self.bench.target.features(dataclasses.replace(rows[number % len(rows)], number=number))

        yield from InTurn(make_features, Coordinator(0, 10**9))


@contextlib.contextmanager
def arm_of(name: str, folder: Path, device: torch.device, tables: list[str]) -> Iterator[None]:
    """Profiling as the arm has it."""
    if name == "absent":
        yield
        return
    page = stages.open_run(folder, times_device=device.type == "cuda", default_role="drafter-0")
    assert page is not None
    reporter = Reporter(page, folder, tables.append, INTERVAL_S if name == "on" else 0.0)
    reporter.start()
    try:
        yield
    finally:
        reporter.stop()
        stages.close_run(page, folder)


def interval_of(ratios: list[float], draws: int = 4000) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap: a block that the machine held up must not decide."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def main() -> None:
    """Run, print, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiling", description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="smollm2-135m-flash4", choices=[case.name for case in CASES])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=24, help="Rounds of the three arms.")
    parser.add_argument("--block-s", type=float, default=1.5, help="Seconds of an arm in a round.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(options.device)
    case = next(case for case in CASES if case.name == options.case)
    bench = Bench(replace(case, kernels=case.kernels.model_copy(update={"cuda_graphs": "on"})), device)
    steps = Steps(bench)
    tables: list[str] = []
    generator = random.Random(1)
    ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
    costs: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as folder, stages.as_role("drafter-0"):
        steps.run(12)  # compile, measure, record
        count = max(2, round(1e3 * options.block_s / steps.run(10)))
        for arm in ARMS:  # each once, uncounted
            with arm_of(arm, Path(folder), device, tables):
                steps.run(count)
        for _ in range(options.blocks):
            for arm in generator.sample(ARMS, len(ARMS)):
                with arm_of(arm, Path(folder), device, tables):
                    steps.run(2)  # joins the page
                    ms[arm].append(steps.run(count))
                    if stages._page is not None:
                        words = stages._page.words
                        costs.append((words[layout.COST_OFF], words[layout.COST_ON]))
        lines = (Path(folder) / "stages.jsonl").read_text(encoding="utf-8").splitlines()
    last = [json.loads(line) for line in lines[-2:]]
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.profiling", *_without_out(sys.argv[1:])]),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "case": options.case,
        "graphs": bench.trainer.graphs_note,
        "steps_per_block": count,
        "median_ms": {arm: statistics.median(values) for arm, values in ms.items()},
        "cost_frac": {},
        "stage_ns": {
            "off": statistics.median(off for off, _ in costs),
            "on": statistics.median(on for _, on in costs),
        },
        "ms": ms,
        "last_interval": last,
    }
    for name, base in (("on", "absent"), ("on", "off"), ("off", "absent")):
        ratios = [a / b - 1 for a, b in zip(ms[name], ms[base], strict=True)]
        low, high = interval_of(ratios)
        result["cost_frac"][f"{name} over {base}"] = {"median": statistics.median(ratios), "low": low, "high": high}
    print(tables[-1])
    print(json.dumps({key: value for key, value in result.items() if key not in ("ms", "last_interval")}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _without_out(arguments: list[str]) -> list[str]:
    if "--out" in arguments:
        at = arguments.index("--out")
        return arguments[:at] + arguments[at + 2 :]
    return arguments


if __name__ == "__main__":
    main()
