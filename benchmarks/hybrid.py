"""A training step of two large targets on one GPU beside their drafters: the 27 B hybrid, and a mixture of experts.

    python -m benchmarks.hybrid                        # on an H200; writes benchmarks/results/hybrid-h200.json
    python -m benchmarks.hybrid --moe                  # Qwen3-30B-A3B's shape; writes benchmarks/results/moe-h200.json
    python -m benchmarks.hybrid --tiny --device cpu    # does it run? With --moe too; writes nothing unless told where

Target and drafter take turns on one device, as a colocated run does: the target's layers up to the last tap on a packed
row, then the drafter's forward, backward and update. Weights are random, every token is supervised. Before anything is
timed, each document's features are compared with those of the document alone, since a fast step that lets documents
leak into each other would be worth nothing; gated-delta layers need `fla-core` to be both fast and right.

The floor is the useful work (benchmarks/shapes.py) at the rate that an H200 holds in matrix products, 670 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.timing import measure
from paceline import __version__
from paceline.config import Loss, Optim
from paceline.models.loading import default_layer_ids
from paceline.models.target import Target
from paceline.records import TokenBatch
from paceline.train.step import PendingResult, TrainStep

STARTED = time.perf_counter()
RESULTS = Path(__file__).parent / "results"
SUSTAINED_TFLOP_PER_S = 670.0
NUM_BATCHES = 4
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""Relative error of a row's features against its documents alone, by type. In bfloat16 rounding alone makes 3.0e-2 in
the hybrid's 62 layers, evenly over all documents and tokens (3.37e-2 at most for a token, 2026-11-30): a leak would
spare the first document, and a small one is found by the target's own probe, which changes other documents' tokens.
Rounding also moves a token to other experts here and there (rarely, but then by much), so that a mixture of experts is
held to its row and not to every element."""


@dataclass(frozen=True)
class Case:
    """A target and the row that it runs on.

    Attributes:
        name: In `shapes.CONFIGS`.
        lengths: Tokens of the documents of each row.
        num_anchors: A.
        heads: Query and key/value heads of the drafter, and their size; None: the target's.
        result: File below ``results/``.
    """

    name: str
    lengths: tuple[int, ...]
    num_anchors: int
    heads: tuple[int, int, int] | None
    result: str


CASES = {
    (False, False): Case("qwen3.6-27b", (3072,) * 4, 2048, (32, 8, 128), "hybrid-h200.json"),
    (True, False): Case("qwen3-30b-a3b", (3072,) * 4, 2048, None, "moe-h200.json"),
    (False, True): Case("tiny-hybrid", (37, 3, 24), 16, (4, 2, 16), "hybrid-tiny.json"),
    (True, True): Case("tiny-moe", (37, 3, 24), 16, None, "moe-tiny.json"),
}
"""By (mixture of experts, tiny)."""


@dataclass
class Bench:
    """A target beside its drafter, and the marks that the clock left between them.

    Attributes:
        marks: Of each step: before the target, between the two, after the update.
    """

    target: Target
    trainer: TrainStep
    batches: Sequence[TokenBatch]
    marks: list[tuple[Any, Any, Any]] = field(default_factory=list)
    _pending: PendingResult | None = None

    def step(self) -> float | None:
        """One whole step; returns the loss of the step before, which is there without waiting."""
        number = len(self.marks)
        before = _mark(self.target.device)
        features = self.target.features(self.batches[number % len(self.batches)])
        between = _mark(self.target.device)
        self.trainer.accumulate(features)
        pending, self._pending = self._pending, self.trainer.update(number)
        self.marks.append((before, between, _mark(self.target.device)))
        return None if pending is None else pending.read().loss

    def milliseconds(self, num_steps: int) -> dict[str, float]:
        """Medians over the last steps, of the target and of the drafter."""
        target_ms, drafter_ms = [], []
        for before, between, after in self.marks[-num_steps:]:
            target_ms.append(_elapsed_ms(before, between))
            drafter_ms.append(_elapsed_ms(between, after))
        return {"target": statistics.median(target_ms), "drafter": statistics.median(drafter_ms)}


def say(text: str) -> None:
    """A line with the time since the start: some phases take a minute."""
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", flush=True)


def build(case: Case, device: torch.device, dtype: torch.dtype, options: argparse.Namespace) -> Bench:
    """Random target and drafter on the device, and rows for them."""
    config = shapes.CONFIGS[case.name]()
    shape = shapes.target_shape(config)
    layer_ids = default_layer_ids(shape.num_layers)
    model = shapes.random_target(config, device, dtype, num_layers=layer_ids[-1] + 1)
    say("the target's weights are made; now its kernels are built and packed rows are tried")
    packing = "packed" if device.type == "cpu" else "auto"
    target = Target(model, shape, layer_ids, packing, feature_dtype=dtype, row_length=sum(case.lengths))
    say(target.packing_note)
    heads = case.heads or (None, None, None)
    draft = shapes.draft_shape(
        shape,
        layer_ids,
        num_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        num_layers=options.draft_layers,
        block_size=options.block_size,
    )
    drafter = shapes.random_drafter(draft, device)
    trainer = TrainStep(
        drafter,
        target.embed,
        drafter.own_head(target.head.to(dtype)),
        Optim(),
        num_anchors=case.num_anchors,
        loss=Loss(gamma=7.0),
        seed=0,
        total_steps=10_000,
        dtype=dtype,
        recompute=options.recompute,
    )
    return Bench(target, trainer, [_row(case.lengths, shape.vocab_size, n) for n in range(NUM_BATCHES)])


def _row(lengths: Sequence[int], vocab_size: int, number: int) -> TokenBatch:
    """A packed row of random documents without padding, every token supervised."""
    generator = torch.Generator().manual_seed(number)
    documents = []
    for i, n in enumerate(lengths):
        ids = torch.randint(0, vocab_size - 1, (n,), generator=generator)
        documents.append((i, ids, torch.ones(n, dtype=torch.bool)))
    return TokenBatch.pack(number, documents, sum(lengths))


def packed_against_alone(target: Target, tokens: TokenBatch) -> dict[str, Any]:
    """Relative error of a packed row's features against those of its documents alone: of all, by document, of a token.

    Raises: SystemExit if documents leak.
    """
    packed = target.features(tokens).context_feature
    documents, difference, whole, largest = [], 0.0, 0.0, 0.0
    for start, end in tokens.spans:
        alone = target.document_features(tokens.input_ids[start:end]).float()
        off = packed[start:end].float() - alone
        documents.append(float(off.norm() / alone.norm()))
        difference, whole = difference + float(off.square().sum()), whole + float(alone.square().sum())
        largest = max(largest, float((off.norm(dim=1) / alone.norm(dim=1)).max()))
    row, limit = (difference / whole) ** 0.5, TOLERANCE[target.dtype]
    print(f"packed against alone: {row:.1e} of the row (limit {limit:.0e}), {max(documents):.1e} of a document")
    if not row <= limit:
        raise SystemExit(f"packed documents differ from documents alone by {row:.1e}: {target.packing_note}")
    return {"row": row, "limit": limit, "documents": documents, "largest_token": largest}


def run(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Build, check, time."""
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    bench = build(case, device, dtype, options)
    target, draft = bench.target, bench.trainer.drafter.shape
    print(f"{case.name}: {target.packing_note}; drafter's attention: {bench.trainer.attention_note}")
    error = packed_against_alone(target, bench.batches[0])
    say("timing, the drafter's kernels being built first")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what documents alone left behind is of no use to a packed row
    timing = measure(bench.step, options.seconds, options.warmup, device=device, min_steps=3)
    step_ms = timing["median_ms"]
    work = {
        "target": shapes.target_work(shapes.CONFIGS[case.name](), target.layer_ids[-1] + 1, case.lengths),
        "drafter": shapes.draft_work(draft, case.lengths, case.num_anchors),
    }
    matmul = sum(part["matmul"] for part in work.values())
    attention = sum(part["attention"] for part in work.values())
    floor_ms = {
        "matmul": 1e3 * matmul / SUSTAINED_TFLOP_PER_S / 1e12,
        "with_attention": 1e3 * (matmul + attention) / SUSTAINED_TFLOP_PER_S / 1e12,
    }
    return {
        "target": {
            "shape": case.name,
            "layers": f"{target.layer_ids[-1] + 1} of {target.shape.num_layers}",
            "layer_ids": target.layer_ids,
            "experts": getattr(target._trunk.config, "_experts_implementation", None) if options.moe else None,
            "packing": target.packing_note,
        },
        "drafter": {
            "layers": draft.num_hidden_layers,
            "hidden": draft.hidden_size,
            "intermediate": draft.intermediate_size,
            "heads": [draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim],
            "vocab": draft.vocab_size,
            "block_size": draft.block_size,
            "attention": bench.trainer.attention_note,
        },
        "row": {"tokens": sum(case.lengths), "documents": list(case.lengths), "anchors": case.num_anchors},
        "dtype": str(dtype).removeprefix("torch."),
        "packed_against_alone": error,
        "ms": {"step": step_ms, **bench.milliseconds(timing["steps"])},
        "tok_per_s": 1e3 * sum(case.lengths) / step_ms,
        "anchor_blocks_per_s": 1e3 * case.num_anchors / step_ms,
        "predictions_per_s": 1e3 * case.num_anchors * (draft.block_size - 1) / step_ms,
        "peak_gib": timing.get("peak_gib"),
        "useful_tflop": {name: sum(part.values()) / 1e12 for name, part in work.items()},
        "floor_ms": floor_ms,
        "share_of_floor": {name: ms / step_ms for name, ms in floor_ms.items()},
        "timing": timing,
    }


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _elapsed_ms(before: Any, after: Any) -> float:
    return 1e3 * (after - before) if isinstance(before, float) else before.elapsed_time(after)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"paceline": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "triton", "fla-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, and write the result file."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrid", description=__doc__.splitlines()[0])
    parser.add_argument("--moe", action="store_true", help="a mixture of experts in place of the hybrid")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: does the benchmark run at all?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--documents", help="lengths of a row's documents, as in 3072,3072,3072,3072")
    parser.add_argument("--anchors", type=int, help="anchors of a row")
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--recompute", action="store_true", help="compute the drafter's layers again in its backward")
    parser.add_argument("--seconds", type=float, default=8.0, help="timed")
    parser.add_argument("--warmup", type=float, default=4.0, help="seconds run before, compiling not counted")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    case = CASES[options.moe, options.tiny]
    lengths = tuple(map(int, options.documents.split(","))) if options.documents else case.lengths
    case = Case(case.name, lengths, options.anchors or case.num_anchors, case.heads, case.result)
    result = {
        "command": re.sub(r" --out \S+", "", " ".join(["python -m benchmarks.hybrid", *arguments])),
        "machine": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine(),
        "versions": _versions(),
        **run(options, case),
    }
    shown = {key: value for key, value in result.items() if key != "timing"}
    print(json.dumps(shown, indent=1))
    path = options.out or (None if options.tiny else RESULTS / case.result)
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
