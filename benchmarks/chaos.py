"""A run that cannot be lost: crashes at every change of a save, and seeded trials at random instants.

    python -m benchmarks.chaos --trials 200 --out benchmarks/results/chaos-cpu.json                       # some minutes
    python -m benchmarks.chaos --device cuda --at-a-time 6 --no-saves --out benchmarks/results/chaos-h200.json
    python -m benchmarks.chaos --short                                                    # what `make test` does
    python -m benchmarks.chaos --ray --trials 50 --out benchmarks/results/chaos-ray-cpu.json  # processes on Ray

Every trial trains the tiny target of the tests until it is struck (killed, stopped, frozen, starved, left without a
disk), starts again until the run is finished, and compares weights, moments and losses with those of a run that nobody
disturbed, bit for bit. With `--ray` its roles are processes of one or two hosts, which are struck as well, and a run
may go on in another layout. The parts are in tests/chaos; the channel's interleavings are a test of their own there.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib.metadata
import json
import logging
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.chaos.harness import World
    from tests.chaos.ray_trials import RayTrial
    from tests.chaos.trials import Trial

TRIALS, RAY_TRIALS = 200, 50

SHORT_TRIALS = 20
"""Two of each fault."""


def main() -> None:
    """Build, strike, print the tables, and write them."""
    parser = argparse.ArgumentParser(description="Strike runs, and compare what comes of them with an undisturbed one.")
    parser.add_argument("--ray", action="store_true", help="trials of runs whose roles are processes on Ray")
    parser.add_argument("--trials", type=int, metavar="N", help=f"{TRIALS}, with --ray {RAY_TRIALS}")
    parser.add_argument("--minutes", type=float, default=600.0, help="with --ray: begin no trial after so many")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-a-time", type=int, default=2, metavar="N")
    parser.add_argument("--no-saves", action="store_true", help="leave out the crashes at every change of a save")
    parser.add_argument(
        "--short", action="store_true", help=f"{SHORT_TRIALS} trials, and fewer kinds of crash a change"
    )
    parser.add_argument("--folder", type=Path, help="working folder; runs with a bug stay in it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    # libraries that start a thread as they are imported; so neither may be before this
    os.environ |= {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # asking must not open the device
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        result = (measure_ray if options.ray else measure)(options, options.folder or Path(temporary) / "chaos")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if result["bugs"] == 0 else 1)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything, as it goes into the result file."""
    from tests.chaos import harness

    started = time.monotonic()
    world = harness.build(folder, options.device)
    print(f"an undisturbed run: {world.steps} steps in {world.seconds:.1f} s")
    saves = [] if options.no_saves else crash_saves(world, options)
    checks = {} if options.no_saves else check_harness(world)
    trials = run_trials(world, options)
    bugs = sum(part["num_problems"] for part in saves) + sum(trial["is_bug"] for trial in trials["trials"])
    return {
        "what": "runs struck in saves and at random instants, resumed, compared with an undisturbed one bit for bit",
        "command": " ".join(["python -m benchmarks.chaos", *sys.argv[1:]]),
        "machine": machine(options.device),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")}
        | {"python": platform.python_version(), "paceline": _paceline(), "commit": _commit()},
        "run": {"steps": world.steps, "seconds": world.seconds, "settings": list(world.settings)},
        "seconds": time.monotonic() - started,
        "bugs": bugs,
        "harness": checks,
        "saves": saves,
        **trials,
    }


def measure_ray(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trials of runs on Ray, as they go into the result file."""
    from tests.chaos import ray_trials

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(Path(__file__).parents[1])}
    os.environ["RAY_worker_niceness"] = "0"  # 15 is the default, and beside other work a process hardly starts
    started = time.monotonic()
    world = ray_trials.build(folder.resolve())
    print(f"an undisturbed run of two drafters: {world.steps} steps in {world.seconds:.1f} s", flush=True)

    count = RAY_TRIALS if options.trials is None else options.trials
    waiting = iter(range(options.first, options.first + count))
    trials: list[RayTrial] = []
    # Ray's clusters want to be made by the main thread of a process
    with concurrent.futures.ProcessPoolExecutor(options.at_a_time, multiprocessing.get_context("spawn")) as pool:
        active: set[concurrent.futures.Future[RayTrial]] = set()
        while True:
            while len(active) < options.at_a_time and time.monotonic() - started < 60 * options.minutes:
                if (index := next(waiting, None)) is None:
                    break
                active.add(pool.submit(ray_trials.ray_trial, world, options.seed, index))
            if not active:
                break
            done, active = concurrent.futures.wait(active, return_when=concurrent.futures.FIRST_COMPLETED)
            for trial in (each.result() for each in done):
                trials.append(trial)
                print(ray_trials.told(trial), flush=True)
    trials.sort(key=lambda trial: trial.index)
    left = ray_trials.left_at_the_end(trials)
    outcomes = collections.Counter(trial.outcome for trial in trials)
    strikes = collections.Counter(strike for trial in trials for strike in trial.strikes)
    print(dict(outcomes), dict(strikes))
    return {
        "what": "runs on Ray whose processes, hosts and driver were struck at random instants, resumed, compared",
        "command": " ".join(["python -m benchmarks.chaos", *sys.argv[1:]]),
        "machine": machine("cpu"),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "ray")}
        | {"python": platform.python_version(), "paceline": _paceline(), "commit": _commit()},
        "run": {"steps": world.steps, "seconds": world.seconds, "settings": list(world.settings)},
        "seconds": time.monotonic() - started,
        "bugs": sum(trial.outcome not in ray_trials.GOOD for trial in trials) + len(left),
        "num_trials": len(trials),
        "num_starts": sum(len(trial.starts) for trial in trials),
        "num_refusals": sum(len(trial.refusals) for trial in trials),
        "num_missed_strikes": sum(trial.num_missed for trial in trials),
        "longest_left_s": max((trial.left_s for trial in trials), default=0.0),
        "left_at_the_end": left,
        "outcomes": dict(outcomes),
        "strikes": {name: strikes[name] for name in ray_trials.STRIKES},
        "strikes_while_starting": sum(
            name.endswith("while starting") for trial in trials for start in trial.starts for name in start["strikes"]
        ),
        "first_layouts": dict(collections.Counter(trial.starts[0]["layout"] for trial in trials)),
        "trials": [asdict(trial) for trial in trials],
    }


def crash_saves(world: World, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Strikes at every change of a save: one made by itself, and one of a whole run."""
    from tests.chaos import saves
    from tests.chaos.harness import together

    parts = []
    for scene in saves.scenes(world, options.short):
        started = time.monotonic()
        operations = scene.list_points()
        points = list(saves.points_of(operations, options.short))
        problems = [
            problem for problem in together(map(scene.struck, points), options.at_a_time) if problem is not None
        ]
        fates = collections.Counter(saves.fate_name(point.fate) for point in points)
        seconds = time.monotonic() - started
        print(f"{scene.name}: {len(operations)} changes, struck {len(points)} times: {len(problems)} problems")
        print("  " + ", ".join(f"{fate} {count}" for fate, count in sorted(fates.items())) + f"; {seconds:.0f} s")
        for problem in problems[:20]:
            print(f"  {problem[:2000]}")
        parts.append(
            {
                "save": scene.name,
                "changes": len(operations),
                "operations": dict(collections.Counter(operation.name for operation in operations)),
                "struck": len(points),
                "fates": dict(fates),
                "num_problems": len(problems),
                "problems": problems[:50],
                "seconds": seconds,
            }
        )
    return parts


def check_harness(world: World) -> dict[str, Any]:
    """Whether what is looked for would be found: a save that does not sync, and a process that hangs."""
    from tests.chaos import harness, saves

    hung = harness.alone(harness.Child(lambda: time.sleep(60)).ended(limit_s=0.2))
    return {
        "problems_without_sync": harness.alone(saves.problems_without_sync(world)),
        "finds_a_hang": hung.code is None and "check_harness" in hung.output,
    }


def run_trials(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Seeded trials, and their table."""
    from tests.chaos.harness import together
    from tests.chaos.trials import GOOD, HANG, trial

    count = SHORT_TRIALS if options.short else TRIALS if options.trials is None else options.trials
    numbers = range(options.first, options.first + count)
    started = time.monotonic()
    trials = together((trial(world, options.seed, number) for number in numbers), options.at_a_time)
    trials.sort(key=lambda trial: trial.index)
    table = table_of(trials)
    print(table_text(table))
    for each in trials:
        if each.outcome not in GOOD:
            print(f"trial {each.index}: {each.outcome}: {each.faults} {each.ends}\n{each.detail}")
    return {
        "num_trials": len(trials),
        "num_starts": sum(len(each.ends) for each in trials),
        "num_strikes": sum(fault != "-" for each in trials for fault in each.faults),
        "num_late_strikes": sum(each.num_late for each in trials),
        "hangs": sum(each.outcome == HANG for each in trials),
        "longest_stop_s": max((each.stop_s for each in trials), default=0.0),
        "trials_seconds": time.monotonic() - started,
        "table": table,
        "trials": [asdict(each) | {"is_bug": each.outcome not in GOOD} for each in trials],
    }


def table_of(trials: list[Trial]) -> dict[str, dict[str, float]]:
    """By a trial's first fault: how many ended how, and the longest time that a request to stop took."""
    from tests.chaos.trials import FAULTS, OUTCOMES

    table: dict[str, dict[str, float]] = {}
    for fault in FAULTS:
        mine = [each for each in trials if each.faults and each.faults[0] == fault]
        row: dict[str, float] = {outcome: sum(each.outcome == outcome for each in mine) for outcome in OUTCOMES}
        table[fault] = row | {
            "trials": len(mine),
            "longest_stop_s": max((each.stop_s for each in mine), default=0.0),
        }
    return table


def table_text(table: dict[str, dict[str, float]]) -> str:
    """The table for a terminal."""
    columns = list(next(iter(table.values())))
    lines = [f"{'fault':20}" + "".join(f"{column:>16}" for column in columns)]
    for fault, row in table.items():
        cells = (f"{row[c]:16.2f}" if c.endswith("_s") else f"{row[c]:16d}" for c in columns)
        lines.append(f"{fault:20}" + "".join(cells))
    return "\n".join(lines)


def machine(device: str) -> dict[str, Any]:
    """What this ran on; the device is asked by another process, as this one must not touch it."""
    found: dict[str, Any] = {"system": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()}
    if device.startswith("cuda"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["device"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return found


def _paceline() -> str:
    from paceline import __version__

    return __version__


def _commit() -> str:
    root = Path(__file__).parents[1]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"


if __name__ == "__main__":
    logging.getLogger("paceline").setLevel(logging.ERROR)
    main()
