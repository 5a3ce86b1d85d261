"""How fast this machine runs the two halves of a step at the demo's shapes, with random weights.

    python -m benchmarks            # writes benchmarks/results/cpu.json

Measured, per phase, over `STEPS` repetitions after one that is not counted: the target's features of a packed row, the
drafter's forward and backward, and the update. Nothing is downloaded: the target is SmolLM2-135M's shape with random
weights, so losses mean nothing beyond being finite.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline import __version__
from paceline.config import Loss, Optim
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.loading import TargetShape, default_layer_ids
from paceline.models.target import Target
from paceline.records import TokenBatch
from paceline.train.step import TrainStep

RESULTS = Path(__file__).parent / "results"
STEPS = 5


def build_target(hidden_size: int, num_layers: int, vocab_size: int) -> Target:
    """A random target of SmolLM2's proportions: heads of 64, three query heads to a key/value head."""
    heads = hidden_size // 64
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    shape = TargetShape(
        model_type="llama",
        architecture="LlamaForCausalLM",
        hidden_size=hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3,
        head_dim=64,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=8192,
        rope=dict(config.rope_parameters),
        softcap=None,
        logit_scale=1.0,
        tie_word_embeddings=True,
        pad_token_id=None,
        eos_token_ids=(),
    )
    return Target(transformers.LlamaForCausalLM(config), shape, default_layer_ids(num_layers))


def build_trainer(target: Target, num_anchors: int, block_size: int, dtype: torch.dtype) -> TrainStep:
    """A one-layer drafter of the target's shape."""
    shape = target.shape
    drafter = DFlashDrafter(
        DraftShape(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            rms_norm_eps=shape.rms_norm_eps,
            max_position_embeddings=shape.max_position_embeddings,
            rope=shape.rope,
            block_size=block_size,
            mask_token_id=shape.vocab_size - 1,
            target_layer_ids=target.layer_ids,
            num_target_layers=shape.num_layers,
            layer_types=("full_attention",),
        )
    )
    drafter.initialise(0, target.embed, target.head)
    return TrainStep(
        drafter,
        target.embed,
        target.head.to(dtype),
        Optim(),
        num_anchors=num_anchors,
        loss=Loss(gamma=4.0),
        seed=0,
        total_steps=100,
        dtype=dtype,
    )


def measure(small: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Time the phases; `small` takes shapes that run in a second, to see that the benchmark itself works."""
    hidden_size, num_layers, vocab_size, length = (192, 4, 512, 128) if small else (576, 30, 49_152, 1_024)
    target = build_target(hidden_size, num_layers, vocab_size)
    trainer = build_trainer(target, num_anchors=length // 4, block_size=8, dtype=dtype)
    document = length // 4
    ids = torch.randint(0, vocab_size - 1, (document,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(document) >= document // 3
    tokens = TokenBatch.pack(0, [(i, ids, mask) for i in range(4)], length)

    features, target_s = _timed(lambda: target.features(tokens))
    _, step_s = _timed(lambda: trainer.accumulate(features))
    pending, update_s = _timed(lambda: trainer.update(0), prepare=lambda: trainer.accumulate(features))
    if not math.isfinite(loss := pending.read().loss):
        raise SystemExit(f"the loss is {loss}: these timings would mean nothing")
    target_median, step_median = statistics.median(target_s), statistics.median(step_s)
    return {
        "shape": {"hidden": hidden_size, "target_layers": num_layers, "vocab": vocab_size, "tokens": length},
        "anchors": trainer.num_anchors,
        "block_size": 8,
        "dtype": str(dtype).removeprefix("torch."),
        "target_ms": _milliseconds(target_s),
        "forward_backward_ms": _milliseconds(step_s),
        "update_ms": _milliseconds(update_s),
        "target_tok_per_s": length / target_median,
        "drafter_tok_per_s": length / step_median,
        "blocks_per_s": trainer.num_anchors / step_median,
    }


def _timed(work: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> tuple[Any, list[float]]:
    seconds = []
    for repetition in range(STEPS + 1):
        prepare()
        started = time.perf_counter()
        result = work()
        if repetition:
            seconds.append(time.perf_counter() - started)
    return result, seconds


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    values = [1000 * s for s in seconds]
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny shapes: does the benchmark run at all?")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = {
        "command": " ".join(["python -m benchmarks", *(sys.argv[1:] if arguments is None else arguments)]),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": options.threads,
        "repetitions": STEPS,
        "versions": {"paceline": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        **measure(options.small, getattr(torch, options.dtype)),
    }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result
