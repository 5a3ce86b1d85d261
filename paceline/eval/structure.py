"""Which models a forward of our own may stand in for: by their structure, and then by a probe of their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from paceline.eval.forwards import Forward

FAMILIES: tuple[type, ...] = (
    transformers.LlamaForCausalLM,
    transformers.MistralForCausalLM,
    transformers.Qwen2ForCausalLM,
    transformers.Qwen3ForCausalLM,
)
"""Classes whose forward is known to be this one, whatever the length: a family that differs only far from the start, by
windows or scaled attention, would pass a short probe."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose angles depend on the position alone, not on the sequence's length."""

PROBE_PROMPT, PROBE_BLOCK, PROBE_KEPT = 24, 5, 2
"""Tokens of the probe's prompt and block, and how many of the block stay before one more follows."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference from the model in the probe, as a share of the row's largest value, by the type of the weights.
Seen in float32: 3e-6 (SmolLM2-135M)."""


def structure_obstacle(model: Any, dtype: torch.dtype) -> str | None:
    """What of a model a forward of our own does not do, in one line; None: it is plain decoder layers in `dtype`."""
    config = model.config
    if type(model) not in FAMILIES:
        return f"{type(model).__name__} is none of {', '.join(family.__name__ for family in FAMILIES)}"
    if getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "some layers see a sliding window"
    rope_type = (config.rope_parameters or {}).get("rope_type")
    if rope_type not in ROPE_TYPES:
        return f"rotary type {rope_type} is none of {', '.join(ROPE_TYPES)}"
    trunk = model.get_decoder()
    if type(trunk.embed_tokens) is not nn.Embedding:
        return f"its embedding is a {type(trunk.embed_tokens).__name__}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its MLP has {config.hidden_act} instead of silu"
    for i, layer in enumerate(trunk.layers):
        if reason := _layer_obstacle(layer, dtype):
            return f"layer {i}: {reason}"
    return None


def _layer_obstacle(layer: Any, dtype: torch.dtype) -> str | None:
    """Which of a layer's projections is no plain linear layer: adapters and quantised weights replace those."""
    type_name = str(dtype).removeprefix("torch.")
    for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
        for name in names:
            projection = getattr(part, f"{name}_proj")
            if type(projection) is not nn.Linear or projection.weight.dtype != dtype:
                return f"{name}_proj is a {type(projection).__name__}, no plain {type_name} linear layer"
    return None


@torch.no_grad()
def difference(own: Forward, model: Forward, vocab_size: int, dtype: torch.dtype, name: str = "lean") -> str | None:
    """Where the probe's logits and taps are not the model's, in one line; None if they are.

    The probe is a prompt of random tokens, then a block of which some are taken back, then one more token.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (PROBE_PROMPT + PROBE_BLOCK + 1,), generator=generator).tolist()
    for (part, seen), (_, wanted) in zip(_walk(own, tokens), _walk(model, tokens), strict=True):
        error = (seen - wanted).abs().amax(-1) / wanted.abs().amax(-1)
        if not error.max() <= TOLERANCE[dtype]:  # NaN is a difference as well
            return f"in a probe the {name} one's {part} differed by {float(error.max()):.1e} of their size"
    return None


def _walk(forward: Forward, tokens: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """What a forward says on the probe's way, named."""
    prompt, block, last = tokens[:PROBE_PROMPT], tokens[PROBE_PROMPT:-1], tokens[-1:]
    forward.clear()
    yield "logits after the prompt", forward.append(prompt, last_only=True)
    if forward.taps:
        yield "states of the prompt", torch.cat(forward.taps)
    yield "logits of a block", forward.append(block)
    forward.keep(PROBE_KEPT)
    yield "logits after a roll-back", forward.append(last)
    if forward.taps:
        yield "states after a roll-back", torch.cat(forward.taps)
