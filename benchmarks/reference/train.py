"""Training of the reference drafter, as long as the device is lent: goes on where it was stopped.

    python -m benchmarks.reference.train --target MODEL --data DIR --run DIR [--kind dflash2] [--block-size 16]
        [--hours 0.2]

Writes ``curve.json`` into the run folder: loss, estimated and really measured acceptance, tokens a second, by step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from paceline import api
from paceline.report.page import duration

EPOCHS = 2

SHOWN = ("step", "loss", "acceptance_length_est", "validation_acceptance_length", "tok_per_s")


def run_of(options: argparse.Namespace) -> dict[str, Any]:
    """The run file."""
    return {
        "run": {"dir": str(options.run), "device": options.device, "seed": options.seed, "max_hours": options.hours},
        "target": {"path": options.target},
        "data": {"path": str(options.data), "epochs": EPOCHS, "max_length": 1024, "validation": 0.01},
        "draft": {"kind": options.kind, "num_layers": options.num_layers, "block_size": options.block_size},
        "optim": {"kind": "muon", "tokens_per_step": options.tokens_per_step},
        "pipeline": {"tokens_per_batch": options.tokens_per_batch},
        "checkpoint": {"every_steps": 250, "keep_last": 1},
        "eval": {"validate_every": 100, "validate_rows": 64},
    }


def curve(run: Path) -> dict[str, Any]:
    """What `metrics.jsonl` says, thinned out to some 300 points, and the report."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    every = max(1, len(lines) // 300)
    points = [
        {key: line[key] for key in SHOWN if line.get(key) is not None}
        for i, line in enumerate(lines) if i % every == 0 or line.get("validation_acceptance_length") is not None
    ]  # fmt: skip
    return {"points": points, "report": json.loads((run / "report.json").read_text(encoding="utf-8"))}


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--kind", default="dflash2")
    parser.add_argument("--num-layers", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tokens-per-step", type=int, default=24_576)
    parser.add_argument("--tokens-per-batch", type=int, default=24_576)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, help="of this call")
    parser.add_argument("--device", default="auto")
    parser.add_argument("overrides", nargs="*", help="more keys of the run file, section.key=value")
    options = parser.parse_args()
    report = api.train(run_of(options), options.overrides)
    (options.run / "curve.json").write_text(json.dumps(curve(options.run)) + "\n", encoding="utf-8")
    print(f"{report.ending} after step {report.step} of {report.total_steps}, {duration(report.seconds)} of training")


if __name__ == "__main__":
    main()
