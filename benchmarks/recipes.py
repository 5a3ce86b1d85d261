"""What a recipe is worth: the same data and target, one setting changed, several seeds; trained and really decoded.

    python -m benchmarks.recipes --target DIR --data DIR --variants kinds --steps 300 --out FILE
    python -m benchmarks.recipes --target DIR --data DIR --variants FILE.json --base FILE.json ...

Each variant is a run of the product (`run_training`) with some keys of the same base changed, over as many tokens as
the others (as many steps, but where a variant says what a step holds); with `--equal-time NAME` also over as many as
fit into the time that the named variant took. The drafter of the last step decodes the prompts as `paceline eval` does
(`--limit 0`: not at all; `--drafted-only`: without plain decoding beside it, so that speed and losslessness are not
known; the acceptance length of several files is then their geometric mean). A file of variants is a JSON list of
objects with a `name` and dotted keys; one with ``"peer": "speculators"`` is trained by `reference.peer`. Numbers of one
call belong together; seconds do so only on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.spine import RESULTS, SAMPLES
from paceline import __version__
from paceline.cli.progress import TrainProgress
from paceline.cli.train import run_training
from paceline.config import load_config
from paceline.eval.decode import CachedTarget, speculative_decode
from paceline.eval.evaluate import encode_prompts, evaluate, read_prompts
from paceline.models.draft import DFlashDrafter
from paceline.models.loading import load_tokenizer
from paceline.train.checkpoint import load_drafter

BASE: dict[str, Any] = {
    "draft.num_layers": 2,
    "draft.block_size": 8,
    "data.epochs": 64,
    "data.max_length": 512,
    "data.validation": 0.05,
    "anchors.per_token": 0.125,
    "optim.lr": 1.5e-3,
    "optim.tokens_per_step": 1024,
    "pipeline.tokens_per_batch": 1024,
    "checkpoint.every_steps": 100_000,
    "checkpoint.keep_last": 1,
    "eval.validate_every": 100_000,
}
"""Keys of every variant, as of a small target."""

KINDS: list[dict[str, Any]] = [
    {"name": "dflash"},
    {"name": "dflash2", "draft.kind": "dflash2"},
    {"name": "dspark", "draft.kind": "dspark", "draft.block_size": 7},  # as many drafted tokens as the others
    {"name": "dflash, kl 0.5", "loss.ce": 0.5, "loss.kl": 0.5},
    {"name": "dflash, dpace", "loss.kind": "dpace"},
]
"""Drafter kinds and losses at equal drafted tokens."""

KEPT = (
    "prompts", "max_new_tokens", "acceptance_length", "acceptance_length_interval", "acceptance_per_position", "rounds",
    "generated_tokens", "baseline_tok_per_s", "speculative_tok_per_s", "speedup", "ngram_acceptance_length",
    "draft_frac", "verify_frac", "lossless", "mismatches", "ties", "loops",
)  # fmt: skip


class Lines(TrainProgress):
    """Collects the lines of the steps, with the time of each."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[dict[str, Any]] = []
        self.times: list[float] = []

    def step(self, line: dict[str, Any], total_steps: int) -> None:
        self.lines.append(line)
        self.times.append(time.perf_counter())


def train(
    variant: dict[str, Any], options: argparse.Namespace, steps: int, seed: int, folder: Path
) -> tuple[DFlashDrafter, dict[str, Any]]:
    """One run; its drafter, and what it took."""
    keys = options.keys | {key: value for key, value in variant.items() if "." in key} | {
        "run.dir": str(folder), "run.device": options.device, "run.seed": seed,
        "target.path": options.target, "data.path": options.data,
    }  # fmt: skip
    token_share = options.keys["optim.tokens_per_step"] / keys["optim.tokens_per_step"]
    keys["run.max_steps"] = max(1, round(steps * token_share))
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    lines = Lines()
    if options.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    if variant.get("peer"):
        from benchmarks.reference.peer import train_peer  # imports the peer, which few have

        return train_peer(config)
    started = time.perf_counter()
    report = run_training(config, lines)
    whole_s = time.perf_counter() - started
    times = lines.times[min(5, len(lines.times) // 3) :]
    seconds = [b - a for a, b in zip(times[:-1], times[1:], strict=True)]
    return load_drafter(folder), {
        "seed": seed,
        "steps": report.step,
        "ms_per_step": round(1e3 * statistics.median(seconds), 2),
        "seconds": round(whole_s, 1),
        "tokens": report.tokens,
        "loss": round(statistics.mean(line["loss"] for line in lines.lines[-20:]), 4),
        "estimated_acceptance_length": report.best_acceptance_length,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if options.device.startswith("cuda") else None,
    }


def decoded(drafter: DFlashDrafter, options: argparse.Namespace, sets: dict[str, list[list[int]]]) -> dict[str, Any]:
    """What the drafter does for the prompts of each file."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafter = drafter.to(device, dtype).requires_grad_(False)
    target = CachedTarget.load(options.target, drafter.shape.target_layer_ids, dtype=dtype, device=device)
    stop_ids = target.shape.eos_token_ids
    if options.drafted_only:
        counts: dict[str, list[list[int]]] = {}
        for name, prompts in sets.items():
            answers = [
                speculative_decode(target, drafter, prompt, options.max_new_tokens, stop_ids).acceptance
                for prompt in prompts
            ]
            counts[name] = [[answer.committed, answer.rounds] for answer in answers]
        lengths = {name: sum(c for c, _ in each) / sum(r for _, r in each) for name, each in counts.items()}
        return {
            "prompts": sum(map(len, sets.values())),
            "max_new_tokens": options.max_new_tokens,
            "acceptance_length": math.prod(lengths.values()) ** (1 / len(lengths)),
            "sets": lengths,
            "counts": counts,
        }
    prompts = [prompt for each in sets.values() for prompt in each]
    found = evaluate(target, drafter, prompts, max_new_tokens=options.max_new_tokens, stop_ids=stop_ids)
    record = found.as_dict()
    return {key: record.get(key) for key in KEPT}


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance and cost of recipes.")
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--data", required=True, help="folder that `paceline prepare` wrote for it")
    parser.add_argument("--variants", default="kinds", help="`kinds`, or a JSON file")
    parser.add_argument("--base", type=Path, help="JSON object of dotted keys in place of those of a small target")
    parser.add_argument("--only", nargs="*", help="names of variants to run")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[SAMPLES / "extraction_heldout.jsonl"])
    parser.add_argument("--limit", type=int, default=24, help="prompts of each file")
    parser.add_argument("--drafted-only", action="store_true", help="acceptance alone")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--equal-time", help="variant whose training time the others get as well")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "recipes.json")
    options = parser.parse_args()
    variants = KINDS if options.variants == "kinds" else json.loads(Path(options.variants).read_text(encoding="utf-8"))
    variants = [each for each in variants if not options.only or each["name"] in options.only]
    options.keys = BASE if options.base is None else json.loads(options.base.read_text(encoding="utf-8"))
    sets: dict[str, list[list[int]]] = {}
    for file in options.prompts if options.limit else []:
        sets[file.stem] = encode_prompts(read_prompts([file], options.limit), load_tokenizer(options.target))
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{torch.get_num_threads()} cores"
    out: dict[str, Any] = {
        "command": f"python -m benchmarks.recipes --target DIR --data DIR --variants {Path(options.variants).name} "
        + (f"--base {options.base.name} " if options.base else "")
        + (f"--only {' '.join(map(json.dumps, options.only))} " if options.only else "")
        + f"--steps {options.steps} --seeds {options.seeds} --limit {options.limit} "
        f"--max-new-tokens {options.max_new_tokens} --device {options.device}"
        + (" --drafted-only" if options.drafted_only else "")
        + (f" --equal-time {json.dumps(options.equal_time)}" if options.equal_time else ""),
        "versions": {"paceline": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "device": device, "base": options.keys, "prompts": [path.name for path in options.prompts], "results": [],
    }  # fmt: skip

    def measure(variant: dict[str, Any], steps: int, seed: int, equal: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as work:
            drafter, run = train(variant, options, steps, seed, Path(work) / "run")
            parameters = sum(p.numel() for p in drafter.parameters())
            row = {**variant, "equal": equal, "parameters": parameters, **run}
            if sets:
                row |= decoded(drafter, options, sets)
        out["results"].append(row)
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
        return row

    for seed in range(options.seeds):  # a seed's variants beside each other: what changes over time changes for all
        rows = {variant["name"]: measure(variant, options.steps, seed, "steps") for variant in variants}
        reference = rows.get(options.equal_time)
        for variant in variants:
            if reference is not None and variant["name"] != options.equal_time:
                other = rows[variant["name"]]
                ratio = reference["ms_per_step"] * reference["steps"] / (other["ms_per_step"] * other["steps"])
                measure(variant, max(1, round(options.steps * ratio)), seed, "time")
    if options.drafted_only and any(variant.get("peer") for variant in variants):
        from benchmarks.reference.peer import compare

        out["peer"] = compare(out["results"])
        options.out.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
