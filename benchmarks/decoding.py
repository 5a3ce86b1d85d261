"""How fast the built-in decoder is on a GPU: against Transformers' own forward, and against the memory's bandwidth.

    python -m benchmarks.decoding --target DIR --draft DIR      # a real pair on the package's held-out prompts
    python -m benchmarks.decoding --shape qwen3-8b              # random weights; what a token and a round cost

With a real pair, prompts are decoded plainly, with n-gram drafts and with the drafter, in turns, once by the forward
that is replayed from CUDA graphs and once by Transformers' own and a context that grows: the same drafter, the same
prompts. With random weights nothing is accepted; a round's cost does not depend on that.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks import shapes
from benchmarks.spine import RESULTS, SAMPLES
from paceline.cli.evaluate import load_any_drafter
from paceline.eval import decode as decoding
from paceline.eval.decode import CachedTarget, ContextDrafter, DeviceStopwatch, NgramDrafter, decode
from paceline.eval.evaluate import encode_prompts, evaluate_blocks, read_prompts
from paceline.models.draft import DFlashDrafter
from paceline.models.loading import default_layer_ids, load_tokenizer

KEPT = (
    "block_size", "prompts", "max_new_tokens", "acceptance_length", "acceptance_length_interval", "generated_tokens",
    "baseline_tok_per_s", "speculative_tok_per_s", "speedup", "ngram_tok_per_s", "ngram_acceptance_length",
    "ngram_speedup", "baseline_decode_tok_per_s", "speculative_decode_tok_per_s", "draft_frac", "verify_frac",
    "first_token_s", "baseline_first_token_s", "lossless", "mismatches", "ties",
)  # fmt: skip


def real_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Both forwards over the same prompts."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    drafter = load_any_drafter(options.draft).to(device, dtype).requires_grad_(False)
    tokenizer = load_tokenizer(options.target)
    prompts = encode_prompts(read_prompts(options.prompts, options.limit), tokenizer)
    layer_ids = drafter.shape.target_layer_ids
    found: dict[str, Any] = {"drafter": describe(drafter)}
    for name, own in (("graphs", True), ("transformers", False)):
        with mock.patch.object(decoding, "static_obstacle", decoding.static_obstacle if own else lambda *_: "left out"):
            started = time.perf_counter()
            target = CachedTarget.load(options.target, layer_ids, dtype=dtype, device=device)
            load_s = time.perf_counter() - started
        started = time.perf_counter()
        evaluation = evaluate_with(target, drafter, prompts, options, target.shape.eos_token_ids, own)
        record = evaluation.as_dict()
        found[name] = {
            "kernel": target.kernel, "load_s": load_s, "seconds": time.perf_counter() - started,
            **{key: record.get(key) for key in KEPT},
        }  # fmt: skip
        print(name, json.dumps(found[name]), flush=True)
    return found


def evaluate_with(
    target: CachedTarget, drafter: DFlashDrafter, prompts: list[list[int]], options: Any, stop_ids: Any, own: bool
) -> Any:
    """One evaluation; without graphs the context grows as on a CPU."""
    size = options.block_size or drafter.shape.block_size
    if own:
        return evaluate_blocks(
            target, drafter, prompts, [size], max_new_tokens=options.max_new_tokens, stop_ids=stop_ids
        )[size]

    def grown(
        target: CachedTarget, drafter: DFlashDrafter, prompt: Any, limit: int, stop: Any, size: Any, *_: Any
    ) -> Any:
        with torch.inference_mode():
            side = ContextDrafter(drafter, target, len(prompt) + limit, size)
            return decode(target, side, prompt, limit, stop, DeviceStopwatch())

    with mock.patch("paceline.eval.evaluate.speculative_decode", grown):
        return evaluate_blocks(
            target, drafter, prompts, [size], max_new_tokens=options.max_new_tokens, stop_ids=stop_ids
        )[size]


def random_shape(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a plain token and of a round of blocks, at several lengths of context."""
    config = shapes.CONFIGS[name]()
    model = shapes.random_target(config, "cuda", torch.bfloat16)
    shape = shapes.target_shape(config)
    draft_shape = shapes.draft_shape(shape, default_layer_ids(shape.num_layers), block_size=options.block_size or 16)
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    target = CachedTarget(model.eval(), shape, draft_shape.target_layer_ids)
    del model
    load_s = time.perf_counter() - started
    drafter = shapes.random_drafter(draft_shape, "cuda").to(torch.bfloat16).requires_grad_(False)
    weights = sum(p.numel() * p.element_size() for p in drafter.parameters())
    lengths = [512, 2048, 8192]
    rows = []
    with torch.inference_mode():
        started = time.perf_counter()
        target.reserve(lengths[-1] + 400, draft_shape.block_size)
        side = target.static_side(drafter, draft_shape.block_size)
        side.begin(lengths[-1] + 400)
        record_s = time.perf_counter() - started
        for length in lengths:
            prompt = torch.randint(0, shape.vocab_size, (length,)).tolist()
            rows.append({"context": length} | costs(target, side, prompt))
            print(name, json.dumps(rows[-1]), flush=True)
    return {
        "kernel": target.kernel, "load_s": load_s, "record_s": record_s, "drafter_bytes": weights,
        "drafter": describe(drafter), "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "rows": rows,
    }  # fmt: skip


def costs(target: CachedTarget, side: Any, prompt: list[int]) -> dict[str, Any]:
    """A prefill, plain tokens and rounds behind it, medians in milliseconds by the host's clock."""

    def timed(work: Callable[[], Any], repeats: int) -> dict[str, float]:
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - started))
        times.sort()
        return {"median": statistics.median(times), "p10": times[repeats // 10], "p90": times[-1 - repeats // 10]}

    def prefill() -> None:
        target.prefill(prompt)

    found: dict[str, Any] = {"prefill_ms": (timed(prefill, 3), timed(prefill, 10))[1]}
    plain = decode(target, None, prompt, 201, ())
    found["token_ms"] = 1e3 * statistics.median(plain.rounds_s[50:])
    answers = []
    for _ in range(2):
        side.begin(len(prompt) + 400)
        answers.append(decode(target, side, prompt, 101, (), DeviceStopwatch()))
    drafted = answers[-1]
    found["round_ms"] = 1e3 * statistics.median(drafted.rounds_s[20:])
    found["draft_frac"] = drafted.draft_s / drafted.decode_s
    found["acceptance_length"] = drafted.acceptance.length
    found["ngram_round_ms"] = 1e3 * statistics.median(decode(target, NgramDrafter(15), prompt, 101, ()).rounds_s)
    found["waits_per_round"] = waits(target, side, prompt)
    return found


def waits(target: CachedTarget, side: Any, prompt: list[int]) -> dict[str, float]:
    """What the host does to the device in a round, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    side.begin(len(prompt) + 400)
    decode(target, side, prompt, 3, ())
    side.begin(len(prompt) + 400)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        answer = decode(target, side, prompt, 41, ())
    counts = {event.key: event.count for event in seen.key_averages() if event.key.startswith("cuda")}
    rounds = len(answer.rounds_s)
    return {"rounds": rounds} | {name: round(count / rounds, 2) for name, count in sorted(counts.items())}


def describe(drafter: DFlashDrafter) -> dict[str, Any]:
    """What of a drafter decides its cost."""
    shape = drafter.shape
    return {
        "layers": shape.num_hidden_layers, "hidden_size": shape.hidden_size, "block_size": shape.block_size,
        "draft_vocab_size": shape.draft_vocab_size, "parameters": sum(p.numel() for p in drafter.parameters()),
    }  # fmt: skip


def main() -> None:
    """Run what was asked for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[SAMPLES / "extraction_heldout.jsonl"])
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--shape", choices=shapes.CONFIGS)
    parser.add_argument("--out", type=Path, default=RESULTS / "decoding-h200.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python -m benchmarks.decoding " + " ".join(
            f"--{name.replace('_', '-')} {value}" for name, value in vars(options).items() if value and name != "out"
        ),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        },
    }  # fmt: skip
    if options.target and options.draft:
        result["pair"] = real_pair(options)
    if options.shape:
        result[options.shape] = random_shape(options.shape, options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
