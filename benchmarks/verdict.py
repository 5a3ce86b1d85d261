"""Is the verdict right on a real pipeline? A sleep is put into one side, the gain of taking it out is predicted, and
then measured.

    python -m benchmarks.verdict --out benchmarks/results/verdict-cpu.json      # about 5 minutes on two quiet cores

Target threads, channel and drafter step are those of a training run (a tiny target and drafter on the CPU). The sleep
makes its side the slower one, and once it is gone the other side is the limit, which is what the prediction is for.
Runs with and without follow one another in turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.profiling import _without_out
from benchmarks.step import CASES, Bench
from paceline import __version__
from paceline.pipeline.coordinator import Coordinator
from paceline.pipeline.local import open_stream
from paceline.profiling.verdict import Verdict, Window, drop_warm_up, judge
from paceline.records import FeatureBatch


@dataclass(frozen=True)
class Scenario:
    """Seconds that both sides sleep a batch, always and while the fault is in.

    Attributes:
        has_cache: Whether the target's features are kept (as by `pipeline.feature_cache_gib`), so that it computes
            nothing. Else both sides compute on the same cores, where a target that no longer sleeps slows the drafter
            down: the gain is an upper limit then.
    """

    name: str
    expected: str
    target_s: float = 0.0
    drafter_s: float = 0.0
    fault_target_s: float = 0.0
    fault_drafter_s: float = 0.0
    has_cache: bool = False


SCENARIOS = [
    Scenario("slow target", "producer-bound", fault_target_s=0.15, has_cache=True),
    Scenario("slow drafter", "consumer-bound", target_s=0.15, fault_drafter_s=0.2),
    Scenario("slow target that computes beside the drafter", "producer-bound", fault_target_s=0.12),
]
QUEUE_DEPTH = 4


def run(bench: Bench, scenario: Scenario, has_fault: bool, seconds: float) -> tuple[Verdict, float]:
    """Train for so long; the verdict, and batches a second after the start."""
    target_s = scenario.target_s + scenario.fault_target_s * has_fault
    drafter_s = scenario.drafter_s + scenario.fault_drafter_s * has_fault
    windows: list[Window] = []
    kept_features: dict[int, FeatureBatch] = {}

    def make_features(number: int) -> FeatureBatch:
        time.sleep(target_s)
        row = number % len(bench.rows)
        batch = kept_features.get(row) or bench.target.features(bench.rows[row])
        if scenario.has_cache:
            kept_features[row] = batch
        return FeatureBatch(replace(batch.tokens, number=number), batch.context_feature, batch.last_hidden)

    with open_stream(
        make_features, Coordinator(0, 10**9), layout="split", targets=1, threads=1, queue_depth=QUEUE_DEPTH,
        max_bytes=1 << 30, min_ready=1,
    ) as stream:  # fmt: skip
        started = last = time.perf_counter()
        for features in stream:
            time.sleep(drafter_s)
            bench.trainer.accumulate(features)
            bench.trainer.update(bench.count).read()
            bench.count += 1
            waits, now = stream.take_waits(), time.perf_counter()
            windows.append(Window(now - last, 1, waits.get_s, waits.put_s, waits.ready_s, stream.num_ready()))
            last = now
            if now - started > seconds:
                break
    kept = drop_warm_up(windows, 2 + QUEUE_DEPTH)
    return (
        judge(kept, targets=1, queue_depth=QUEUE_DEPTH),
        len(kept) / sum(window.seconds for window in kept),
    )


def main() -> None:
    """Run, print, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdict", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(next(case for case in CASES if case.name == "tiny"), torch.device("cpu"))
    results = []
    for scenario in SCENARIOS:
        found, with_fault, without = [], [], []
        for _ in range(options.rounds):
            verdict, rate = run(bench, scenario, True, options.seconds)
            found.append(verdict)
            with_fault.append(rate)
            without.append(run(bench, scenario, False, options.seconds)[1])
        gains = [verdict.gain.value for verdict in found if verdict.gain is not None]
        measured = [after / before for before, after in zip(with_fault, without, strict=True)]
        predicted = statistics.fmean(gains) if gains else None
        result = {
            "scenario": scenario.name,
            "expected": scenario.expected,
            "verdicts": [verdict.line() for verdict in found],
            "predicted_gain": predicted,
            "measured_gain": statistics.fmean(measured),
            "measured_gains": measured,
            "error_frac": None if predicted is None else predicted / statistics.fmean(measured) - 1,
            "batches_per_s": {"with": with_fault, "without": without},
        }
        results.append(result)
        print(json.dumps(result, indent=1), flush=True)
    if options.out:
        content = {
            "command": " ".join(["python -m benchmarks.verdict", *_without_out(sys.argv[1:])]),
            "machine": f"{platform.machine()}, CPU",
            "versions": {
                "paceline": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers")},
            },
            "scenarios": results,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
