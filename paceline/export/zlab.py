"""The released DFlash folder: what z-lab's decoder, vLLM and SGLang load.

    config.json          a Qwen3 configuration, and `dflash_config` with what makes it a drafter
    model.safetensors    11 tensors a layer and 3 more; embedding and head are the target's and never written

Engines fill a missing key with a default of their own, each another one, so every key is written and checked on the way
back. Source: z-lab/Qwen3-8B-DFlash-b16 and the readers of z-lab's `dflash` 0.1.0, vLLM and SGLang.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ModelError
from paceline.export.folder import (
    ARCHITECTURE,
    CONFIG_FILE,
    LAYER_KEYS,
    check_fixed,
    check_tensors,
    check_written,
    export_place,
    has_layout,
    read_config,
    read_tensors,
    rope_of,
    wanted,
    write_export,
)
from paceline.models.draft import DFlashDrafter, DraftShape

LAYOUT = "z-lab"

PLAIN_KEYS = (*LAYER_KEYS, "num_target_layers")
"""Fields of `DraftShape` that stand in the file under their own name."""

FIXED_VALUES = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
"""What the drafter always is. A file that says otherwise holds another model."""

KNOWN_DFLASH_KEYS = {
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "causal",
    # The target's own; its embedding and head, which the drafter shares, bring them along.
    "input_embedding_scale",
    "final_logit_softcapping",
    "output_multiplier",
}

UNSUPPORTED_ROPE_KEYS = ("mrope_section", "partial_rotary_factor")
"""Engines would rotate otherwise than the drafter, which rotates the whole head by one position."""


def export_zlab(drafter: DFlashDrafter, out_dir: Path | str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the folder, read it back, and put it in place whole.

    Args:
        out_dir: A new or empty folder, or an earlier export, which is replaced.
        dtype: Type of the weights in the file.
    Returns: the folder.
    Raises: ModelError if the folder holds something else, cannot be written, or the drafter has what engines would
        misread.
    """
    if drafter.shape.draft_vocab_size is not None:
        raise ModelError(
            f"the drafter drafts from {drafter.shape.draft_vocab_size} of the target's {drafter.shape.vocab_size} "
            "tokens, which the z-lab layout has no place for: engines would use the target's whole head, whose other "
            "rows were never trained against. Use --format speculators, or train with draft.vocab=full"
        )
    folder = export_place(out_dir)
    config = _config_of(drafter.shape, dtype)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in drafter.state_dict().items()}
    written = dataclasses.replace(drafter.shape, rope=config["rope_parameters"])
    write_export(folder, config, tensors, lambda place: check_written(place, load_zlab(place).shape, written, tensors))
    return folder


def serving_commands(folder: Path, drafter: DFlashDrafter) -> list[str]:
    """How each engine takes the folder: vLLM counts drafted tokens, SGLang the anchor as well."""
    vllm = json.dumps({"method": "dflash", "model": str(folder), "num_speculative_tokens": drafter.num_predicted})
    return [
        f"next: paceline eval --target TARGET --draft {folder} --prompts FILE",
        f"vLLM: vllm serve TARGET --speculative-config '{vllm}'",
        f"SGLang: python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {drafter.num_predicted + 1}",
    ]


def load_zlab(folder: Path | str) -> DFlashDrafter:
    """Read a released or exported folder: the drafter on the CPU, its weights in the type of the file.

    Raises: ModelError if a file is missing or damaged, the drafter is of another kind, or its tensors do not match.
    """
    folder = Path(folder)
    drafter = DFlashDrafter(_shape_of(read_config(folder, LAYOUT), folder))
    tensors = read_tensors(folder)
    check_tensors(tensors, drafter.state_dict(), folder)
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def is_zlab(folder: Path | str) -> bool:
    """Whether a folder looks like a released drafter: its configuration has a `dflash_config`."""
    return has_layout(folder, LAYOUT)


def _config_of(shape: DraftShape, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration, in the order in which it is written."""
    if unsupported := [key for key in UNSUPPORTED_ROPE_KEYS if shape.rope.get(key) is not None]:
        raise ModelError(f"rotary settings {unsupported} have no meaning for a drafter, and engines would misread them")
    rope = {"rope_type": "default", **shape.rope}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        **{key: getattr(shape, key) for key in PLAIN_KEYS},
        **FIXED_VALUES,
        "layer_types": list(shape.layer_types),
        "use_sliding_window": "sliding_attention" in shape.layer_types,
        "sliding_window": shape.sliding_window,
        "is_causal": shape.is_causal,
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "block_size": shape.block_size,
        },
        # Transformers 5 reads the first, engines on version 4 the other two.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }


def _shape_of(config: dict[str, Any], folder: Path) -> DraftShape:
    """The drafter that a configuration describes. Raises: ModelError for what this drafter is not."""
    path, draft = folder / CONFIG_FILE, config["dflash_config"]
    if config.get("architectures") != [ARCHITECTURE]:
        raise ModelError(f"{path}: architectures {config.get('architectures')}; [{ARCHITECTURE!r}] was wanted")
    check_fixed(config, FIXED_VALUES, path)
    if unknown := sorted(set(draft) - KNOWN_DFLASH_KEYS):
        raise ModelError(f"{path}: dflash_config has {unknown}, which mean another kind of drafter")
    num_layers = wanted(config, "num_hidden_layers", path)
    layer_types = tuple(config.get("layer_types") or ["full_attention"] * num_layers)
    return DraftShape(
        **{key: wanted(config, key, path) for key in PLAIN_KEYS},
        rope=rope_of(config, path),
        block_size=_block_size_of(config, path),
        mask_token_id=wanted(draft, "mask_token_id", path),
        target_layer_ids=tuple(wanted(draft, "target_layer_ids", path)),
        layer_types=layer_types,
        is_causal=_causality_of(config, layer_types, path),
        sliding_window=_window_of(config, layer_types, path),
    )


def _block_size_of(config: dict[str, Any], path: Path) -> int:
    """Released folders have it at the top, in `dflash_config`, or in both."""
    places = (config.get("block_size"), config["dflash_config"].get("block_size"))
    found = {value for value in places if value is not None}
    if len(found) != 1:
        raise ModelError(f"{path}: block_size is {places[0]} at the top and {places[1]} in dflash_config")
    return int(found.pop())


def _causality_of(config: dict[str, Any], layer_types: Iterable[str], path: Path) -> bool:
    """Attention inside a block. Where the file does not say: causal in sliding layers, and not in full ones."""
    for written in (config.get("is_causal"), config["dflash_config"].get("causal")):
        if written is not None:
            return bool(written)
    kinds = set(layer_types)
    if len(kinds) > 1:
        raise ModelError(
            f"{path} has no is_causal, which means causal sliding layers beside bidirectional full ones; "
            "a drafter with both is not supported"
        )
    return kinds == {"sliding_attention"}


def _window_of(config: dict[str, Any], layer_types: Iterable[str], path: Path) -> int | None:
    return (
        wanted(config, "sliding_window", path) if "sliding_attention" in layer_types else config.get("sliding_window")
    )
