"""What a demo's recipe is worth: acceptance length on both held-out sets, for many recipes, teacher-forced.

    python -m benchmarks.demo_recipe --target DIR --variants FILE --device cuda --out FILE

Each variant is a JSON object of dotted run-file keys (``{"draft.num_layers": 2, "optim.lr": 2e-3}``) and ``rows``, the
number of conversations, over `BASE`. The arithmetic is that of the demo (float32 target, bfloat16 drafter), so a GPU
answers in a minute what a laptop does in seven; it says nothing about the time that a variant takes there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.spine import RESULTS, SAMPLES
from paceline.cli.train import build_trainer, resolve_config
from paceline.config import load_config
from paceline.data.dataset import Dataset
from paceline.data.prepare import PrepareSettings, prepare
from paceline.eval.validation import Validation
from paceline.models.target import FeatureCache, Target
from paceline.plan.resolve import ResolvedRun
from paceline.records import FeatureBatch, StepSums

BASE = {
    "run.device": "cpu",
    "draft.num_layers": 1,
    "draft.block_size": 8,
    "draft.vocab": 4096,
    "draft.dtype": "bfloat16",
    "data.epochs": 8,
    "data.max_length": 512,
    "data.validation": 0.0,
    "anchors.per_token": 0.25,
    "optim.lr": 1.5e-3,
    "optim.tokens_per_step": 1024,
    "pipeline.tokens_per_batch": 1024,
}
NUM_HELDOUT = 40


def prepared(target: str, lines: list[str], folder: Path) -> Path:
    """A data set of these conversations, made once."""
    if not (folder / "prepare.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        chats = folder.with_suffix(".jsonl")
        chats.write_text("".join(lines), encoding="utf-8")
        prepare([chats], folder, PrepareSettings(tokenizer=target, max_length=512))
    return folder


def batches(resolved: ResolvedRun, target: Target, cache: FeatureCache) -> Iterator[FeatureBatch]:
    """Every micro-batch of the run with its features, kept over epochs on the device."""
    for number in range(resolved.end_batch):
        yield target.features(resolved.batches.batch(number), cache)


def measure(variant: dict[str, Any], target_path: str, work: Path, device: str) -> dict[str, Any]:
    """Train one variant and measure it on both sets."""
    started = time.perf_counter()
    settings = BASE | {key: value for key, value in variant.items() if "." in key}
    rows = int(variant.get("rows", 480))
    lines = (SAMPLES / "extraction_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:rows]
    data = prepared(target_path, lines, work / f"train-{rows}")
    paths = [f"target.path={target_path}", f"data.path={data}"]
    config = load_config(None, [*paths, *(f"{key}={json.dumps(value)}" for key, value in settings.items())])
    resolved, _ = resolve_config(config)
    target = Target.load(
        target_path,
        layer_ids=resolved.draft.target_layer_ids,
        device=device,
        packing="per_document",
        feature_dtype=torch.bfloat16,
    )
    trainer = build_trainer(resolved, target)
    sums, losses = StepSums(), []
    for features in batches(resolved, target, FeatureCache(64 << 30)):
        sums += trainer.accumulate(features)
        last = features.tokens.number + 1 == resolved.end_batch
        if sums.batches == resolved.batches_per_step or last:
            trainer.update(len(losses), sums.weight)
            losses.append(sums.loss / sums.weight)
            sums = StepSums()
    result: dict[str, Any] = {"steps": len(losses), "loss": sum(losses[-20:]) / len(losses[-20:])}
    for name in ("heldout", "unseen"):
        chats = (SAMPLES / f"extraction_{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        dataset = Dataset.open(prepared(target_path, chats[:NUM_HELDOUT], work / name))
        validation = Validation(target, dataset, range(len(dataset)), num_anchors=256, dtype=torch.bfloat16)
        acceptance = validation.measure(trainer.drafter)
        assert acceptance is not None  # nothing stops it
        result[name] = {"acceptance_length": acceptance.length, "per_position": acceptance.per_position}
    return {**variant, **result, "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance length of demo recipes.")
    parser.add_argument("--target", required=True, help="folder of the demo's target")
    parser.add_argument("--variants", type=Path, required=True, help="JSON list of variants")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "demo-recipe.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        results = []
        for variant in json.loads(options.variants.read_text(encoding="utf-8")):
            results.append(measure(variant, options.target, Path(work), options.device))
            print(json.dumps(results[-1]), flush=True)
            options.out.write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
