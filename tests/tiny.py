"""Builders of tiny random targets, drafters and packed rows; everything is a pure function of its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.kinds import drafter_class
from paceline.models.loading import quiet_transformers
from paceline.models.target import Target
from paceline.records import TokenBatch

VOCAB = 272


def row(
    lengths: Sequence[int], length: int | None = None, *, seed: int = 0, number: int = 0, supervised: float = 0.7
) -> TokenBatch:
    """A packed row of random documents; `supervised` is the share of tokens under the loss mask."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for i, n in enumerate(lengths):
        ids = torch.randint(1, VOCAB - 8, (n,), generator=generator)
        documents.append((i, ids, torch.rand(n, generator=generator) < supervised))
    return TokenBatch.pack(number, documents, sum(lengths) if length is None else length)


def target_config(family: str, **changes: Any) -> Any:
    """Configuration of a tiny target: llama, mistral, qwen2 (biases), qwen3, gemma2, gemma3 or qwen3_5 (hybrid)."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 257,
    }
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    if family == "llama":
        config = transformers.LlamaConfig(**(common | {"rope_parameters": rope} | changes))
    elif family == "mistral":
        own = {"rope_parameters": rope, "sliding_window": None}
        config = transformers.MistralConfig(**(common | own | changes))
    elif family == "qwen2":
        config = transformers.Qwen2Config(**(common | {"rope_parameters": rope} | changes))
    elif family == "qwen3":
        config = transformers.Qwen3Config(**(common | {"rope_parameters": rope, "tie_word_embeddings": True} | changes))
    elif family == "gemma2":
        own = {"query_pre_attn_scalar": 8, "sliding_window": 6, "final_logit_softcapping": 30.0}
        config = transformers.Gemma2Config(**(common | own | changes))
    elif family == "gemma3":
        own = {"query_pre_attn_scalar": 8, "sliding_window": 4}
        own["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
        config = transformers.Gemma3TextConfig(**(common | own | changes))
    elif family == "qwen3_5":
        own = {
            "num_hidden_layers": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": rope | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        }
        config = transformers.Qwen3_5TextConfig(**(common | own | changes))
    else:
        raise ValueError(family)
    return config


FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "qwen3_5")


def randomise(model: Any, seed: int = 0) -> Any:
    """Weights that hide nothing: norms away from neutral, decay of gated-delta layers slow enough to leak."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(uniform(parameter, 0.01, 1.0).log())
            elif parameter.dim() < 2:
                parameter.add_(uniform(parameter, -0.3, 0.3))
            elif parameter.dim() == 2 and parameter.shape[1] > 1:
                scale = 1 / math.sqrt(parameter.shape[1])
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, scale, generator=generator))
    return model.float().eval()


def causal_lm(family: str, seed: int = 0, attention: str | None = None, **changes: Any) -> Any:
    """A tiny random causal LM of a family."""
    with quiet_transformers():
        torch.manual_seed(seed)
        kwargs = {} if attention is None else {"attn_implementation": attention}
        model = transformers.AutoModelForCausalLM.from_config(target_config(family, **changes), **kwargs)
    return randomise(model, seed)


def save(model: Any, folder: Path) -> str:
    """Write a model as a Transformers folder; its path."""
    with quiet_transformers():
        model.save_pretrained(folder)
    return str(folder)


def target(family: str, folder: Path, **kwargs: Any) -> Target:
    """A tiny target of a family, by way of a folder; `kwargs` go to `Target.load`."""
    if not folder.exists():
        save(causal_lm(family), folder)
    return Target.load(str(folder), **kwargs)


def draft_shape(**changes: Any) -> DraftShape:
    """Shape of a tiny drafter for the tiny targets."""
    num_layers = changes.get("num_hidden_layers", 2)
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "block_size": 4,
        "mask_token_id": 267,
        "target_layer_ids": (1, 3),
        "num_target_layers": 5,
        "layer_types": ("full_attention",) * num_layers,
    }
    return DraftShape(**(fields | changes))


OPTIONS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6},
    "dspark": {
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
"""Small options of each drafter kind."""


def shape_of_kind(kind: str, options: dict[str, Any] | None = None, **changes: Any) -> DraftShape:
    """Shape of a tiny drafter of a kind."""
    return draft_shape(kind=kind, options=OPTIONS[kind] | (options or {}), **changes)


def drafter(shape: DraftShape | None = None, seed: int = 0) -> DFlashDrafter:
    """A tiny drafter with large random weights, norms included, so that every term matters."""
    shape = shape or draft_shape()
    model = drafter_class(shape.kind)(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.empty(parameter.shape).normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
                )
            else:
                parameter.copy_(0.7 + 0.6 * torch.rand(parameter.shape, generator=generator))
    return model
