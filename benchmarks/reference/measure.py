"""What the reference drafter is worth on prompt sets: written into ``reference.json``, set by set.

    python -m benchmarks.reference.measure --target MODEL --run DIR --data DIR --sets FILE.jsonl... --out FILE

On a GPU it fills in ``speedup_h200``, on a CPU ``speedup_cpu``; the same file is added to. ``estimate_error`` compares
the acceptance length that training showed last with the one measured when the prompts of the same held-out rows are
decoded: estimate / measured - 1. ``train`` is what ``curve.json`` of the run folder says.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline import __version__, api
from paceline.control.run_folder import RunFolder
from paceline.data.dataset import Dataset
from paceline.eval.decode import CachedTarget
from paceline.eval.evaluate import evaluate
from paceline.train.checkpoint import load_drafter

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


def estimate_error(options: argparse.Namespace) -> dict[str, Any]:
    """The estimate on the held-out rows against real decoding of their prompts."""
    curve = json.loads((options.run / "curve.json").read_text(encoding="utf-8"))
    key = "validation_acceptance_length"
    estimate = [point[key] for point in curve["points"] if point.get(key) is not None][-1]
    config = RunFolder(options.run).read_config()
    dataset = Dataset.open(options.data)
    prompts = []
    for row in dataset.split(config.data.validation)[1][: config.eval.validate_rows]:
        ids, mask = dataset.row(int(row))
        prompts.append(ids[: int(mask.int().argmax())].tolist())
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafter = load_drafter(options.run).to(device, dtype).requires_grad_(False)
    target = CachedTarget.load(options.target, drafter.shape.target_layer_ids, dtype=dtype, device=device)
    found = evaluate(
        target, drafter, prompts, max_new_tokens=options.max_new_tokens, stop_ids=target.shape.eos_token_ids
    )
    measured = found.as_dict()["acceptance_length"]
    return {"prompts": len(prompts), "estimate": estimate, "measured": measured, "error": estimate / measured - 1}


def trained(run: Path) -> dict[str, Any]:
    """Tokens, steps, seconds and speed of the run's last call, for the summary."""
    report = json.loads((run / "curve.json").read_text(encoding="utf-8"))["report"]
    return {key: report[key] for key in ("tokens", "step", "seconds")} | {
        "tok_per_s": report["tokens"] / report["seconds"]
    }


def main() -> None:
    """Measure the sets, one after the other; the file is whole after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--run", type=Path, required=True, help="run folder, checkpoint, or exported drafter")
    parser.add_argument("--data", type=Path, help="the data set of the run, for the error of its estimate")
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
    result.setdefault("measured", {})[where] = {
        "command": "python -m benchmarks.reference.measure --target MODEL --run DIR --sets FILE.jsonl... "
        f"--limit {options.limit} --max-new-tokens {options.max_new_tokens} --device {options.device} --out FILE",
        "device": device,
        "versions": {"paceline": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "sets": {},
    }  # fmt: skip
    if options.data is not None:
        held_out = estimate_error(options)
        result |= {"estimate_error": held_out["error"], "estimate": held_out, "train": trained(options.run)}
        print(json.dumps(held_out), flush=True)
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
                "lossless": found["lossless"],
                "num_ties": found.get("ties", 0),
            }
        lengths = [result["sets"][name]["acceptance_length"] for name in MAIN_SETS if name in result["sets"]]
        if len(lengths) == len(MAIN_SETS):
            result["geomean_acceptance_length"] = math.prod(lengths) ** (1 / len(lengths))
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
