"""The released DFlash folder: what z-lab's decoder, vLLM and SGLang load.

    config.json          a Qwen3 configuration, and `dflash_config` with what makes it a drafter
    model.safetensors    11 tensors a layer and 3 more, and those of the kind; embedding and head are the target's and
                         never written

DFlash2 has its options in `dflash_config` alone. DSpark has them at the top level, where vLLM, SGLang and DeepSpec read
them, and in `dflash_config`, where trainers that build on DFlash do; `sample_from_anchor` only at the top level, as
vLLM 0.32 refuses a drafter that has it in `dflash_config`.
Engines fill a missing key with a default of their own, each another one, so every key is written and checked on the way
back. Source: z-lab/Qwen3-8B-DFlash-b16 and the readers of z-lab's `dflash` 0.1.0, vLLM and SGLang; for DSpark
deepseek-ai/DeepSpec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from paceline.errors import ModelError
from paceline.export.folder import (
    ANCHOR_KEY,
    ARCHITECTURES,
    CODE_FILE,
    CONFIG_FILE,
    LAYER_KEYS,
    causality,
    check_anchor,
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
    option_names,
    options_of,
    read_config,
    rope_of,
    token_id,
    vllm_command,
    wanted,
    write_export,
)
from paceline.export.weights import read_tensors
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.engine_limits import SGLANG_ALGORITHMS
from paceline.models.kinds import drafter_class
from paceline.models.target import Target

LAYOUT = "z-lab"

PLAIN_KEYS = (*LAYER_KEYS, "num_target_layers")
"""Fields of `DraftShape` that stand in the file under their own name."""

FIXED_VALUES = {"hidden_act": "silu", "attention_bias": False}
FIXED_ENGINE_VALUES = {"is_neox_style": True, "logit_scale": 1.0}
FIXED_DFLASH_VALUES = {"use_aux_hidden_state": True, "use_swa": False}
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
    ANCHOR_KEY,
    *FIXED_DFLASH_VALUES,
}

KNOWN_KEYS = {
    *transformers.Qwen3Config().to_dict(),
    *FIXED_ENGINE_VALUES,
    ANCHOR_KEY,
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
    kind = drafter.shape.kind
    if auto_map and kind != "dflash":
        raise ModelError(
            f"--auto-map: the file of code computes draft.kind=dflash, and this drafter is of draft.kind={kind}; leave "
            "it out"
        )
    folder = export_place(out_dir)
    check_drafter(drafter.shape, "the drafter", "target_layer_ids")
    config = _config_of(drafter.shape, dtype)
    if target is not None:
        check_target(drafter.shape, target, target.shape.model_type)
        config["dflash_config"] |= _of_target(drafter.shape, target)
    texts = dict(texts or {})
    if auto_map:
        config["auto_map"] = {"AutoModel": f"{CODE_FILE.removesuffix('.py')}.{ARCHITECTURES[LAYOUT][kind]}"}
        texts[CODE_FILE] = Path(__file__).with_name("auto_model.py").read_text(encoding="utf-8")
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in drafter.state_dict().items()}
    written = dataclasses.replace(drafter.shape, rope=config["rope_parameters"], is_causal=causality(drafter.shape))
    write_export(
        folder, config, tensors, lambda place: check_written(place, load_zlab(place).shape, written, tensors), texts
    )
    return folder


def serving_commands(folder: Path | str, drafter: DFlashDrafter, target_name: str = "TARGET") -> list[str]:
    """How each engine takes the folder: vLLM counts drafted tokens, SGLang one more, the token before them."""
    return [
        f"next: paceline check {folder} --target {target_name}",
        f"eval: paceline eval --target {target_name} --draft {folder} --prompts FILE",
        vllm_command(folder, drafter, target_name),
        f"SGLang: python -m sglang.launch_server --model-path {target_name} "
        f"--speculative-algorithm {SGLANG_ALGORITHMS[drafter.shape.kind]} "
        f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {drafter.num_predicted + 1}",
    ]


def load_zlab(folder: Path | str) -> DFlashDrafter:
    """Read a released or exported folder: the drafter on the CPU, its weights in the type of the file.

    Raises: ModelError if a file is missing or damaged, the drafter is of another kind, or its tensors do not match.
    """
    folder = Path(folder)
    shape = _shape_of(read_config(folder, LAYOUT), folder)
    drafter = drafter_class(shape.kind)(shape)
    tensors = read_tensors(folder)
    check_tensors(tensors, drafter.state_dict(), folder)
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def is_zlab(folder: Path | str) -> bool:
    """Whether a folder looks like a released drafter: its configuration has a `dflash_config`."""
    return has_layout(folder, LAYOUT)


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The drafter kind that a configuration's architecture names; None: none that is known."""
    named = {architecture: kind for kind, architecture in ARCHITECTURES[LAYOUT].items()}
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        return None
    return named.get(str(architectures[0]))


def known_keys(kind: str) -> tuple[set[str], set[str]]:
    """Keys that may stand at the top level, and in `dflash_config`; others mean another kind of drafter."""
    own = set(option_names(kind))
    if kind == "dspark":
        return KNOWN_KEYS | own | {"mask_token_id", "target_layer_ids"}, KNOWN_DFLASH_KEYS | own
    return KNOWN_KEYS | set(OF_TARGET), KNOWN_DFLASH_KEYS | set(OF_TARGET) | own


def _config_of(shape: DraftShape, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration, in the order in which it is written."""
    if unsupported := [key for key in UNSUPPORTED_ROPE_KEYS if shape.rope.get(key) is not None]:
        raise ModelError(f"rotary settings {unsupported} have no meaning for a drafter, and engines would misread them")
    rope = {"rope_type": "default", **shape.rope}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_causal = causality(shape)
    block = {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)}
    options = {name: shape.options[name] for name in option_names(shape.kind)}
    is_dspark = shape.kind == "dspark"
    return {
        "architectures": [ARCHITECTURES[LAYOUT][shape.kind]],
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
        **({ANCHOR_KEY: True, **block, **options} if is_dspark else {}),
        "dflash_config": {**block, "block_size": shape.block_size, **options},
        # Transformers 5 reads the first, engines on version 4 the other two.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }


def _of_target(shape: DraftShape, target: Target) -> dict[str, float]:
    """What the target has beside its matrices; nothing for most. Raises: ModelError if engines would leave it out."""
    values = (embedding_factor(shape, target), target.head.scale, target.head.softcap)
    found = {key: value for key, value in zip(OF_TARGET, values, strict=True) if value is not None and value != 1.0}
    if found and shape.kind == "dspark":
        raise ModelError(
            f"{target.shape.model_type} has {found}, which engines do not apply for draft.kind=dspark: they would "
            "draft from other logits than were trained. Train draft.kind=dflash2 or dflash for this target"
        )
    return found


def _shape_of(config: dict[str, Any], folder: Path) -> DraftShape:
    """The drafter that a configuration describes. Raises: ModelError for what this drafter is not."""
    path, draft = folder / CONFIG_FILE, config["dflash_config"]
    kind = kind_of(config)
    if kind is None:
        names = " or ".join(repr([name]) for name in ARCHITECTURES[LAYOUT].values())
        raise ModelError(f"{path}: architectures {config.get('architectures')}; {names} was wanted")
    top_keys, nested_keys = known_keys(kind)
    for section, known, name in ((draft, nested_keys, f"{path}: dflash_config"), (config, top_keys, str(path))):
        if unknown := sorted(set(section) - known):
            raise ModelError(f"{name} has {unknown}, which mean another kind of drafter")
    check_anchor((config, draft), kind, path)
    plain = numbers(config, PLAIN_KEYS, path)
    taps = layer_ids(draft, "target_layer_ids", path)
    check_fixed(config, FIXED_VALUES | FIXED_ENGINE_VALUES, path)
    check_fixed(config, {"target_hidden_size": plain["hidden_size"], "draft_vocab_size": plain["vocab_size"]}, path)
    check_fixed(config, {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in taps]}, path)
    check_fixed(draft, FIXED_DFLASH_VALUES, path)
    mask_token_id = token_id(draft, "mask_token_id", path)
    if kind == "dspark":
        check_fixed(config, {"mask_token_id": mask_token_id, "target_layer_ids": list(taps)}, path)
    layer_types = tuple(config.get("layer_types") or ["full_attention"] * plain["num_hidden_layers"])
    shape = DraftShape(
        **plain,
        rope=rope_of(config, path),
        block_size=_block_size_of(config, path),
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        layer_types=layer_types,
        is_causal=_causality_of(config, layer_types, path),
        sliding_window=_window_of(config, layer_types, path),
        kind=kind,
        options=options_of((config, draft) if kind == "dspark" else (draft,), kind, path),
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
