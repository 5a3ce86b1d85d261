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

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.errors import ModelError
from paceline.files import staged_folder
from paceline.models.draft import DFlashDrafter, DraftShape

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

ARCHITECTURE = "DFlashDraftModel"

PLAIN_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "num_target_layers",
)
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
    folder = Path(out_dir).expanduser().resolve()
    _check_place(folder)
    config = _config_of(drafter.shape, dtype)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in drafter.state_dict().items()}
    try:
        with staged_folder(folder) as partial:
            (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            safetensors.torch.save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
            _check_written(partial, drafter.shape, tensors)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"export to {folder} could not be written: {error}") from error
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
    config = _read_config(folder)
    shape = _shape_of(config, folder)
    try:
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
    drafter = DFlashDrafter(shape)
    _check_tensors(tensors, drafter.state_dict(), folder)
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def is_zlab(folder: Path | str) -> bool:
    """Whether a folder looks like a released drafter: its configuration has a `dflash_config`."""
    try:
        return "dflash_config" in json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


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


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("dflash_config"), dict):
        raise ModelError(f"{path} has no `dflash_config`: a drafter in the z-lab layout was wanted")
    return config


def _shape_of(config: dict[str, Any], folder: Path) -> DraftShape:
    """The drafter that a configuration describes. Raises: ModelError for what this drafter is not."""
    path, draft = folder / CONFIG_FILE, config["dflash_config"]
    if config.get("architectures") != [ARCHITECTURE]:
        raise ModelError(f"{path}: architectures {config.get('architectures')}; [{ARCHITECTURE!r}] was wanted")
    for key, wanted in FIXED_VALUES.items():
        if config.get(key, wanted) != wanted:
            raise ModelError(f"{path}: {key}={config[key]!r} is not supported; {wanted!r} was wanted")
    if unknown := sorted(set(draft) - KNOWN_DFLASH_KEYS):
        raise ModelError(f"{path}: dflash_config has {unknown}, which mean another kind of drafter")
    num_layers = _wanted(config, "num_hidden_layers", path)
    layer_types = tuple(config.get("layer_types") or ["full_attention"] * num_layers)
    return DraftShape(
        **{key: _wanted(config, key, path) for key in PLAIN_KEYS},
        rope=_rope_of(config, path),
        block_size=_block_size_of(config, path),
        mask_token_id=_wanted(draft, "mask_token_id", path),
        target_layer_ids=tuple(_wanted(draft, "target_layer_ids", path)),
        layer_types=layer_types,
        is_causal=_causality_of(config, layer_types, path),
        sliding_window=_window_of(config, layer_types, path),
    )


def _wanted(section: dict[str, Any], key: str, path: Path) -> Any:
    if section.get(key) is None:
        raise ModelError(f"{path} has no {key}, and a guess would change what the drafter computes")
    return section[key]


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
        _wanted(config, "sliding_window", path) if "sliding_attention" in layer_types else config.get("sliding_window")
    )


def _rope_of(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Rotary settings in the newer form, from either schema."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope:
        rope["rope_theta"] = _wanted(config, "rope_theta", path)
    return rope


def _check_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor], folder: Path) -> None:
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [
        f"{key} {list(found[key].shape)} for {list(wanted[key].shape)}"
        for key in sorted(wanted.keys() & found.keys())
        if found[key].shape != wanted[key].shape
    ]
    if missing or unexpected or shapes:
        raise ModelError(
            f"{folder / WEIGHTS_FILE} does not match its configuration: missing {missing}, unexpected {unexpected}, "
            f"other shapes {shapes}"
        )


def _check_written(folder: Path, shape: DraftShape, tensors: dict[str, Tensor]) -> None:
    """Read the folder as a stranger would, and compare."""
    read = load_zlab(folder)
    rope = {"rope_type": "default", **shape.rope}
    if read.shape != dataclasses.replace(shape, rope=rope):
        raise ModelError(f"export: the configuration reads back as {read.shape}, written was {shape}")
    if damaged := [name for name, tensor in read.state_dict().items() if not torch.equal(tensor, tensors[name])]:
        raise ModelError(f"export: tensors read back otherwise than written: {damaged}; is a weight not finite?")


def _check_place(folder: Path) -> None:
    """Only a new or empty folder, or an earlier export and nothing else, may be written to."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ModelError(f"--out {folder} is a file; a folder was wanted")
    names = {entry.name for entry in folder.iterdir()}
    if names and not (is_zlab(folder) and names <= {CONFIG_FILE, WEIGHTS_FILE}):
        raise ModelError(f"--out {folder} holds other files than an export; choose a new folder")
