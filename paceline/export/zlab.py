"""The released DFlash folder: what z-lab's decoder, vLLM and SGLang load.

    config.json          a Qwen3 configuration, and `dflash_config` with what makes it a drafter
    model.safetensors    11 tensors a layer and 3 more; embedding and head are the target's and never written

Engines fill a missing key with a default of their own, each another one, so every key is written and checked on the way
back. Source: z-lab/Qwen3-8B-DFlash-b16 and the readers of z-lab's `dflash` 0.1.0, vLLM and SGLang.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from paceline.errors import ModelError
from paceline.export.folder import (
    ARCHITECTURE,
    CODE_FILE,
    CONFIG_FILE,
    LAYER_KEYS,
    causality,
    check_drafter,
    check_fixed,
    check_target,
    check_tensors,
    check_written,
    embedding_factor,
    export_place,
    has_layout,
    layer_ids,
    numbers,
    read_config,
    rope_of,
    token_id,
    wanted,
    write_export,
)
from paceline.export.weights import read_tensors
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.target import Target

LAYOUT = "z-lab"

PLAIN_KEYS = (*LAYER_KEYS, "num_target_layers")
"""Fields of `DraftShape` that stand in the file under their own name."""

FIXED_VALUES = {"hidden_act": "silu", "attention_bias": False}
FIXED_ENGINE_VALUES = {"is_neox_style": True, "logit_scale": 1.0, "sample_from_anchor": False}
FIXED_DFLASH_VALUES = {"sample_from_anchor": False, "use_aux_hidden_state": True, "use_swa": False}
"""What the drafter always is. A file that says otherwise holds another model. Of these only the first are written; an
engine reads the others where they are there."""

OF_TARGET = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
"""Factors of the target's embedding and logits, and the soft cap of these: its own embedding and head bring them along,
but z-lab's decoder takes the bare matrices, and these from the drafter."""

KNOWN_DFLASH_KEYS = {
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "causal",
    *FIXED_DFLASH_VALUES,
    *OF_TARGET,
}

KNOWN_KEYS = {
    *transformers.Qwen3Config().to_dict(),
    *FIXED_ENGINE_VALUES,
    *OF_TARGET,
    "block_size",
    "dflash_config",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "is_causal",
    "max_window_layers",
    "num_target_layers",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "target_hidden_size",
    # These say nothing of what the drafter computes; published folders have the target's own, such as tied embeddings.
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}

UNSUPPORTED_ROPE_KEYS = ("mrope_section", "partial_rotary_factor")
"""Engines would rotate otherwise than the drafter, which rotates the whole head by one position."""


def export_zlab(
    drafter: DFlashDrafter,
    out_dir: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    target: Target | None = None,
    auto_map: bool = False,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write the folder, read it back, and put it in place whole.

    Args:
        out_dir: A new or empty folder, or an earlier export, which is replaced.
        dtype: Type of the weights in the file.
        target: The target or the start of it, in `dtype`. Without it the factors that it has beside its matrices, as
            Gemma does, are not written, and z-lab's decoder drafts as if there were none.
        auto_map: Also write the file of code by which Transformers loads the folder.
        texts: Further files to write, by name: the model card.
    Returns: the folder.
    Raises: ModelError if the folder holds something else, cannot be written, the drafter has what engines would
        misread, or was trained for another target.
    """
    if drafter.shape.draft_vocab_size is not None:
        raise ModelError(
            f"the drafter drafts from {drafter.shape.draft_vocab_size} of the target's {drafter.shape.vocab_size} "
            "tokens, which the z-lab layout has no place for: engines would use the target's whole head, whose other "
            "rows were never trained against. Use --format speculators, or train with draft.vocab=full"
        )
    folder = export_place(out_dir)
    check_drafter(drafter.shape, "the drafter", "target_layer_ids")
    config = _config_of(drafter.shape, dtype)
    if target is not None:
        check_target(drafter.shape, target, target.shape.model_type)
        config["dflash_config"] |= _of_target(drafter.shape, target)
    texts = dict(texts or {})
    if auto_map:
        config["auto_map"] = {"AutoModel": f"{CODE_FILE.removesuffix('.py')}.{ARCHITECTURE}"}
        texts[CODE_FILE] = Path(__file__).with_name("auto_model.py").read_text(encoding="utf-8")
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in drafter.state_dict().items()}
    written = dataclasses.replace(drafter.shape, rope=config["rope_parameters"], is_causal=causality(drafter.shape))
    write_export(
        folder, config, tensors, lambda place: check_written(place, load_zlab(place).shape, written, tensors), texts
    )
    return folder


def serving_commands(folder: Path | str, drafter: DFlashDrafter, target_name: str = "TARGET") -> list[str]:
    """How each engine takes the folder: vLLM counts drafted tokens, SGLang the anchor as well."""
    vllm = json.dumps({"method": "dflash", "model": str(folder), "num_speculative_tokens": drafter.num_predicted})
    return [
        f"next: paceline check {folder} --target {target_name}",
        f"eval: paceline eval --target {target_name} --draft {folder} --prompts FILE",
        f"vLLM: vllm serve {target_name} --speculative-config '{vllm}'",
        f"SGLang: python -m sglang.launch_server --model-path {target_name} --speculative-algorithm DFLASH "
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
    is_causal = causality(shape)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        **{key: getattr(shape, key) for key in PLAIN_KEYS},
        **FIXED_VALUES,
        "tie_word_embeddings": False,
        "layer_types": list(shape.layer_types),
        "use_sliding_window": "sliding_attention" in shape.layer_types,
        "sliding_window": shape.sliding_window,
        # Any value would be about every layer: causal sliding layers beside bidirectional full ones have no other word.
        **({} if is_causal == "sliding" else {"is_causal": is_causal}),
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


def _of_target(shape: DraftShape, target: Target) -> dict[str, float]:
    """What the target has beside its matrices; nothing for most."""
    values = (embedding_factor(shape, target), target.head.scale, target.head.softcap)
    return {key: value for key, value in zip(OF_TARGET, values, strict=True) if value is not None and value != 1.0}


def _shape_of(config: dict[str, Any], folder: Path) -> DraftShape:
    """The drafter that a configuration describes. Raises: ModelError for what this drafter is not."""
    path, draft = folder / CONFIG_FILE, config["dflash_config"]
    if config.get("architectures") != [ARCHITECTURE]:
        raise ModelError(f"{path}: architectures {config.get('architectures')}; [{ARCHITECTURE!r}] was wanted")
    for section, known, name in ((draft, KNOWN_DFLASH_KEYS, f"{path}: dflash_config"), (config, KNOWN_KEYS, str(path))):
        if unknown := sorted(set(section) - known):
            raise ModelError(f"{name} has {unknown}, which mean another kind of drafter")
    plain = numbers(config, PLAIN_KEYS, path)
    taps = layer_ids(draft, "target_layer_ids", path)
    check_fixed(config, FIXED_VALUES | FIXED_ENGINE_VALUES, path)
    check_fixed(config, {"target_hidden_size": plain["hidden_size"], "draft_vocab_size": plain["vocab_size"]}, path)
    check_fixed(config, {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in taps]}, path)
    check_fixed(draft, FIXED_DFLASH_VALUES, path)
    layer_types = tuple(config.get("layer_types") or ["full_attention"] * plain["num_hidden_layers"])
    shape = DraftShape(
        **plain,
        rope=rope_of(config, path),
        block_size=_block_size_of(config, path),
        mask_token_id=token_id(draft, "mask_token_id", path),
        target_layer_ids=taps,
        layer_types=layer_types,
        is_causal=_causality_of(config, layer_types, path),
        sliding_window=_window_of(config, layer_types, path),
    )
    check_drafter(shape, str(path), "dflash_config.target_layer_ids")
    return shape


def _block_size_of(config: dict[str, Any], path: Path) -> int:
    """Released folders have it at the top, in `dflash_config`, or in both."""
    places = (config.get("block_size"), config["dflash_config"].get("block_size"))
    found = {value for value in places if value is not None}
    if len(found) != 1:
        raise ModelError(f"{path}: block_size is {places[0]} at the top and {places[1]} in dflash_config")
    return int(found.pop())


def _causality_of(config: dict[str, Any], layer_types: Iterable[str], path: Path) -> bool | Literal["sliding"]:
    """Attention inside a block. Where the file does not say: causal in sliding layers, and not in full ones.

    So vLLM, SGLang and z-lab's newer code read it; z-lab/Qwen3.5-27B-DFlash and gemma-4-31B-it-DFlash are such folders.
    """
    places = (config.get("is_causal"), config["dflash_config"].get("causal"))
    said = {bool(value) for value in places if value is not None}
    if len(said) == 2:
        raise ModelError(
            f"{path}: is_causal={places[0]} and dflash_config.causal={places[1]}: z-lab goes by the first, vLLM by the "
            "second; make them equal, as the drafter was trained"
        )
    if said:
        return said.pop()
    kinds = set(layer_types)
    return "sliding" if len(kinds) > 1 else kinds == {"sliding_attention"}


def _window_of(config: dict[str, Any], layer_types: Iterable[str], path: Path) -> int | None:
    return (
        wanted(config, "sliding_window", path) if "sliding_attention" in layer_types else config.get("sliding_window")
    )
