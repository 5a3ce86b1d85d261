"""One run file, with only its `topology` changed: in one process, and on two Ray nodes that lose a target and a node.

    python -m benchmarks.cluster --data DIR      # writes benchmarks/results/cluster-cpu.json

The demo's target and drafter on a data set prepared for it. With one drafter losses have to be the same bits; with two
they differ by the order in which float32 sums are added up. Nodes are raylets on this host, so seconds a step say what
the processes and their transport cost on its few cores, and nothing of a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.spine import RESULTS
from paceline.cli.demo import demo_config
from paceline.cli.progress import TrainProgress
from paceline.cli.train import run_training
from paceline.config import RunConfig, parse_config
from paceline.models.assets import demo_target
from paceline.train.metrics import read_metrics

STORE = 1 << 30


class Strikes(TrainProgress):
    """Calls something at a step."""

    def __init__(self, at: dict[int, Callable[[], None]]) -> None:
        super().__init__(quiet=True)
        self._at = at

    def step(self, line: dict[str, Any], total_steps: int) -> None:
        """A line has been written."""
        self._at.pop(line["step"], lambda: None)()


def run_config(target: str, data: Path, run_dir: Path, steps: int, **topology: Any) -> RunConfig:
    """The demo's run over a data set, cut short; only the topology differs."""
    tree = demo_config(target, run_dir.parent, is_own=True).model_dump(mode="json")
    tree["run"] |= {"dir": str(run_dir), "max_steps": steps}
    tree["data"] |= {"path": str(data)}
    tree["draft"] |= {"vocab": "observed"}
    tree["topology"] |= {"threads": 1} | topology
    tree["pipeline"] |= {"queue_depth": "auto", "feature_cache_gib": 0.0}
    tree["optim"] |= {"tokens_per_step": 2 * int(tree["pipeline"]["tokens_per_batch"])}
    tree["checkpoint"] |= {"every_steps": 10}
    tree["eval"] |= {"validate_every": 1000, "validate_rows": 4}
    return parse_config(tree)


def summary(run_dir: Path, seconds: float, straight: list[float] | None) -> dict[str, Any]:
    """Losses against the straight run's, and the time of a step."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    losses = [line["loss"] for line in lines]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        "seconds": seconds,
        "steps": len(losses),
        "median_step_s": statistics.median(line["seconds"] for line in lines),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "events": [event["event"] for event in events if event["event"] != "checkpoint"],
        "ledger": json.loads((run_dir / "report.json").read_text())["ledger"],
    }
    found |= next(({"transport": {k: v for k, v in e.items() if k not in ("time", "event")}} for e in events
                   if e["event"] == "transport"), {})  # fmt: skip
    if straight is not None:
        found["same_bits"] = losses == straight
        found["largest_relative_difference"] = max(abs(a - b) / b for a, b in zip(losses, straight, strict=True))
    return found


def on_two_nodes(config: RunConfig, strike_at: int) -> float:
    """Train on two raylets; with one drafter a target's process dies at a step, and the second node ten steps later."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
    )
    second = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.wait_for_nodes()
    topology = config.topology.model_copy(update={"address": cluster.address})
    config = config.model_copy(update={"topology": topology})
    strikes: dict[int, Callable[[], None]] = {}
    if topology.drafters == 1:  # for two drafters and a target one node has no room

        def kill() -> None:
            roles = json.loads((Path(config.run.dir) / "run.json").read_text())["roles"]
            os.kill(roles["target-0"]["pid"], signal.SIGKILL)

        strikes = {strike_at: kill, strike_at + 10: lambda: cluster.remove_node(second, allow_graceful=False)}
    started = time.perf_counter()
    try:
        run_training(config, Strikes(strikes))
        return time.perf_counter() - started
    finally:
        cluster.shutdown()


def main() -> None:
    """Run all four and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="A data set prepared for the demo's target.")
    parser.add_argument("--target", help="Its folder; by default the demo's target.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS / "cluster-cpu.json")
    options = parser.parse_args()
    target = options.target or str(demo_target())
    layouts: dict[str, dict[str, Any]] = {
        "local": {"executor": "local"},
        "ray_split": {"executor": "ray", "layout": "split", "targets": 2},
        "ray_split_2_drafters": {"executor": "ray", "layout": "split", "targets": 1, "drafters": 2},
        "ray_colocated_2": {"executor": "ray", "layout": "colocated", "drafters": 2},
    }
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.cluster --data DIR --steps {options.steps}",
        "host": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "versions": {name: version(name) for name in ("torch", "transformers", "ray")} | {
            "python": platform.python_version()
        },
    }  # fmt: skip
    straight = None
    with tempfile.TemporaryDirectory(prefix="paceline-cluster-") as work:
        for name, topology in layouts.items():
            run_dir = Path(work) / name
            config = run_config(target, options.data, run_dir, options.steps, **topology)
            started = time.perf_counter()
            if name == "local":
                run_training(config, Strikes({}))
                seconds = time.perf_counter() - started
            else:
                seconds = on_two_nodes(config, strike_at=8)
            result[name] = summary(run_dir, seconds, straight)
            straight = straight or [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl")]
            print(name, json.dumps(result[name]), flush=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
