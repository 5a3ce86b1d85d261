"""The whole path on this machine's device, as a user runs it: prepare, train, evaluate; what came out, and how fast.

    python -m benchmarks.spine --target DIR --device cuda      # writes benchmarks/results/spine-cuda.json

Trains on the conversations that ship with the package, so `--target` is the demo's target. Speeds are medians over the
steps after the first fifth; the file holds the spread, the versions and the command.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline import __version__

RESULTS = Path(__file__).parent / "results"
SAMPLES = Path(__file__).parents[1] / "paceline" / "data" / "samples"


def paceline(*arguments: object) -> str:
    """Run the command; its standard output. Raises: CalledProcessError."""
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def run_file(work: Path, options: argparse.Namespace) -> Path:
    """The run file of the benchmark."""
    tree = {
        "run": {"dir": str(work / "run"), "device": options.device},
        "target": {"path": str(options.target)},
        "draft": {"num_layers": options.layers, "block_size": options.block_size},
        "data": {"path": str(work / "data"), "epochs": options.epochs, "validation": 0.03},
        "optim": {"lr": options.lr, "tokens_per_step": options.tokens},
        "pipeline": {"tokens_per_batch": options.tokens},
        "eval": {"validate_every": 50},
    }
    path = work / "run.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return path


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Prepare, train and evaluate below `work`."""
    paceline("prepare", SAMPLES / "extraction_train.jsonl", "--tokenizer", options.target, "--out", work / "data")
    started = time.perf_counter()
    report = json.loads(paceline("train", run_file(work, options), "--json"))
    train_s = time.perf_counter() - started
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steady = sorted(line["tok_per_s"] for line in lines[len(lines) // 5 :])
    evaluation = json.loads(
        paceline(
            "eval",
            "--target",
            options.target,
            "--draft",
            work / "run",
            "--device",
            options.device,
            "--prompts",
            SAMPLES / "extraction_heldout.jsonl",
            "--max-new-tokens",
            96,
            "--json",
            "-",
        )  # fmt: skip
    )
    return {
        "steps": report["step"],
        "train_s": train_s,
        "tok_per_s": {"median": statistics.median(steady), "least": steady[0], "most": steady[-1]},
        "get_wait_frac": report["get_wait_s"] / report["seconds"],
        "loss": [lines[0]["loss"], lines[-1]["loss"]],
        "validation": {
            line["step"]: line["validation_acceptance_length"]
            for line in lines
            if "validation_acceptance_length" in line
        },
        "evaluation": {key: value for key, value in evaluation.items() if key not in ("target", "draft", "versions")},
    }


def main() -> None:
    """Run, print, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spine", description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=12_288)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or RESULTS / f"spine-{options.device.split(':')[0]}.json"
    on_gpu = options.device.startswith("cuda")
    with tempfile.TemporaryDirectory() as work:
        measured = measure(Path(work), options)
    result = {
        "command": " ".join(["python -m benchmarks.spine", *sys.argv[1:]]).replace(str(options.target), "SMOLLM2"),
        "settings": {k: v for k, v in vars(options).items() if k not in ("target", "out")},
        "machine": torch.cuda.get_device_name()
        if on_gpu
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {
            "paceline": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        **measured,
    }
    print(json.dumps(result, indent=1))
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
