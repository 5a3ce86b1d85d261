"""What the reference drafter is worth on prompt sets: written into ``reference.json``, set by set.

    python -m benchmarks.reference.measure --target MODEL --run DIR --data DIR --sets FILE.jsonl... --out FILE

On a GPU it fills in ``speedup_h200``, on a CPU ``speedup_cpu``; the same file is added to. ``estimate_error`` compares
the acceptance length that training shows for held-out rows with the one measured when their prompts are decoded:
estimate / measured - 1. ``--max-new-tokens`` should be that of the answers, as both then count the same tokens.
``train`` and ``curve`` are of the whole run, from its ``metrics.jsonl`` and ``curve.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from paceline import __version__, api
from paceline.cli.evaluate import load_any_drafter
from paceline.control.run_folder import RunFolder
from paceline.data.dataset import Dataset
from paceline.eval.decode import CachedTarget
from paceline.eval.evaluate import TIE_GAP, evaluate
from paceline.eval.validation import Validation
from paceline.models.target import Target

MAIN_SETS = ("gsm8k", "humaneval", "mt-bench")
"""Those of the geometric mean."""

KEPT = (
    "prompts", "generated_tokens", "acceptance_length", "acceptance_length_interval", "acceptance_per_position",
    "ngram_acceptance_length", "baseline_tok_per_s", "speculative_tok_per_s", "speedup", "ngram_speedup", "lossless",
    "mismatches", "ties", "loops",
)  # fmt: skip


def measured(file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A set's record."""
    record = api.evaluate(
        options.target, options.run, [file], limit=options.limit, max_new_tokens=options.max_new_tokens,
        device=options.device,
    )  # fmt: skip
    return {key: record[key] for key in KEPT if key in record}


def held_out_rows(dataset: Dataset, run: Path | None, count: int | None = None) -> list[int]:
    """Rows that a run has kept out of its training, `eval.validate_rows` of them by default; without a run any rows."""
    if run is None:
        return np.random.default_rng(0).permutation(len(dataset.lengths))[:count].tolist()
    config = RunFolder(run).read_config()
    return [int(row) for row in dataset.split(config.data.validation)[1][: count or config.eval.validate_rows]]


def estimate_error(options: argparse.Namespace) -> dict[str, Any]:
    """The estimate of training (`eval.validation`) on held-out rows against real decoding of their prompts."""
    dataset = Dataset.open(options.data)
    rows = held_out_rows(dataset, None if options.fresh else options.run, options.rows)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafter = load_any_drafter(options.run).to(device, dtype).requires_grad_(False)
    layer_ids = drafter.shape.target_layer_ids
    part = Target.load(options.target, layer_ids=layer_ids, dtype=dtype, device=device, packing="per_document")
    estimate = Validation(part, dataset, rows, num_anchors=256, dtype=dtype).measure(drafter)
    assert estimate is not None
    prompts = []
    for row in rows:
        ids, mask = dataset.row(row)
        prompts.append(ids[: int(mask.int().argmax())].tolist())
    target = CachedTarget.load(options.target, layer_ids, dtype=dtype, device=device)
    found = evaluate(
        target, drafter, prompts, max_new_tokens=options.max_new_tokens, stop_ids=target.shape.eos_token_ids
    ).as_dict()
    measured = found["acceptance_length"]
    return {
        "prompts": len(prompts), "rows": "made after the run" if options.fresh else "of the run, not trained on",
        "estimate": estimate.length, "measured": measured, "interval": found["acceptance_length_interval"],
        "error": estimate.length / measured - 1, "where": str(dtype).removeprefix("torch.") + f" on {device.type}",
    }  # fmt: skip


def trained(run: Path) -> dict[str, Any]:
    """Tokens, steps, seconds and speed of the whole run, however often it was stopped and gone on with.

    Seconds are those of steps: validation and saves are left out, and of a start all but its first step.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    tokens, seconds = (sum(line[key] for line in lines) for key in ("tokens", "seconds"))
    config = RunFolder(run).read_config()
    return {
        "tokens": tokens, "steps": lines[-1]["step"], "seconds": seconds, "tok_per_s": tokens / seconds,
        "kind": config.draft.kind, "num_layers": config.draft.num_layers, "block_size": config.draft.block_size,
        "epochs": config.data.epochs, "seed": config.run.seed,
    }  # fmt: skip


def thinned(points: list[dict[str, Any]], most: int = 300) -> list[dict[str, Any]]:
    """At most so many points of a curve, in order: those with a measured acceptance come before others."""
    measured = [i for i, point in enumerate(points) if point.get("validation_acceptance_length") is not None]
    others = sorted(set(range(len(points))) - set(measured))
    kept = evenly(measured, most)
    return [points[i] for i in sorted(kept + evenly(others, most - len(kept)))]


def evenly(items: list[int], most: int) -> list[int]:
    """At most so many of them, evenly spread, the last one among them."""
    if len(items) <= most:
        return items
    return [items[len(items) - 1 - i * len(items) // most] for i in range(most)]


def main() -> None:
    """Measure the sets, one after the other; the file is whole after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--run", type=Path, required=True, help="run folder, checkpoint, or exported drafter")
    parser.add_argument("--data", type=Path, help="the data set of the run, for the error of its estimate")
    parser.add_argument("--fresh", action="store_true", help="--data was made after the run: all of it is held out")
    parser.add_argument("--rows", type=int, help="held-out rows; by default those that training measures")
    parser.add_argument("--sets", type=Path, nargs="*", default=[])
    parser.add_argument("--limit", type=int, help="prompts of each set; all by default")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    where = "h200" if options.device.startswith("cuda") else "cpu"
    result: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    device = torch.cuda.get_device_name() if where == "h200" else f"{torch.get_num_threads()} threads of a CPU"
    earlier = result.setdefault("measured", {}).get(where, {})
    result["measured"][where] = {
        "command": "python -m benchmarks.reference.measure --target MODEL --run DIR --sets FILE.jsonl... "
        + (f"--limit {options.limit} " if options.limit else "")
        + f"--max-new-tokens {options.max_new_tokens} --device {options.device} --out FILE",
        "device": device,
        "tie_gap": TIE_GAP[torch.bfloat16 if where == "h200" else torch.float32],
        "versions": {"paceline": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
    }  # fmt: skip
    same = {key: value for key, value in earlier.items() if key != "sets"} == result["measured"][where]
    result["measured"][where]["sets"] = earlier["sets"] if same else {}  # of other sets, measured in the same way
    if options.data is not None:
        held_out = estimate_error(options)
        result |= {"estimate_error": held_out["error"], "estimate": held_out}
        print(json.dumps(held_out), flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if (options.run / "curve.json").is_file():
        points = json.loads((options.run / "curve.json").read_text(encoding="utf-8"))["points"]
        result |= {"train": trained(options.run), "curve": thinned(points)}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for file in options.sets:
        found = measured(file, options)
        print(file.stem, json.dumps(found), flush=True)
        result["measured"][where]["sets"][file.stem] = found
        own = result.setdefault("sets", {}).setdefault(file.stem, {})
        own[f"speedup_{where}"] = found["speedup"]
        if where == "h200" or "speedup_h200" not in own:  # acceptance of the larger measurement
            own |= {
                "acceptance_length": found["acceptance_length"],
                "ngram_acceptance_length": found.get("ngram_acceptance_length"),
                "lossless": found["mismatches"] == 0,  # ties are none
                "num_ties": found.get("ties", 0),
            }
        lengths = [result["sets"][name]["acceptance_length"] for name in MAIN_SETS if name in result["sets"]]
        if len(lengths) == len(MAIN_SETS):
            result["geomean_acceptance_length"] = math.prod(lengths) ** (1 / len(lengths))
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
