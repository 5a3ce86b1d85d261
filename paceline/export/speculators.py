"""The speculators folder: what vLLM's speculators integration and the package `speculators` load.

    config.json          the algorithm, its target by name, and the drafter's layers as a nested Qwen3 configuration
    model.safetensors    11 tensors a layer and 3 more, and those of the kind; for a part of the vocabulary also `d2t`
                         (draft token i is the target's token i + d2t[i]), `t2d` (which of the target's tokens can be
                         drafted), and the rows of the target's head for those tokens (`lm_head.weight`)

The embedding, and the head over the whole vocabulary, are not written: both readers take them from the target, vLLM
without a second copy. Older folders carry them, and load.
Source: `speculators` 0.9.0, which writes the same, and the reader in vLLM 0.33.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.export.folder import (
    ANCHOR_KEY,
    ARCHITECTURES,
    CONFIG_FILE,
    LAYER_KEYS,
    LAYOUT_KEYS,
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
    num_drafted,
    numbers,
    option_names,
    options_of,
    predicts_from_anchor,
    read_config,
    rope_of,
    token_id,
    vllm_command,
    wanted,
    write_export,
)
from paceline.export.weights import read_tensors
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.engine_limits import VLLM_MARKOV_HEADS
from paceline.models.kinds import drafter_class
from paceline.models.loading import read_shape
from paceline.models.target import Target

LAYOUT = "speculators"
VERSION = "0.9.0"
"""Of the package whose layout this is."""

FIXED_LAYER_VALUES = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    # Not written; vLLM takes both from the drafter's configuration.
    "is_neox_style": True,
    "logit_scale": 1.0,
}
"""What the drafter always is. A file that says otherwise holds another model."""

KNOWN_KEYS = {
    LAYOUT_KEYS[LAYOUT],
    ANCHOR_KEY,
    "architectures",
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "num_target_layers",
    "sliding_window_non_causal",
    "speculators_model_type",
    "target_hidden_size",
    "transformer_layer_config",
    # These say nothing of what the drafter computes.
    "auto_map",
    "dtype",
    "max_anchors",
    "speculators_version",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
}

ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
"""Rotary kinds that vLLM computes as Transformers does, and what it reads of each beside `rope_theta`."""

OF_TARGET = {"embed_tokens.weight", "lm_head.weight"}
"""Copies of the target's, which a folder may carry; not read, as the drafter is given the target's own."""


def export_speculators(
    drafter: DFlashDrafter,
    target: Target,
    target_name: str,
    out_dir: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write the folder, read it back, and put it in place whole.

    Args:
        target: The target or the start of it; only shape, embedding and head are used.
        target_name: Hub id or folder of the target, which readers look up; a folder is written as a full path.
        out_dir: A new or empty folder, or an earlier export, which is replaced.
        dtype: Type of the weights in the file.
        texts: Further files to write, by name: the model card.
    Returns: the folder.
    Raises: ModelError if the folder holds something else, cannot be written, target and drafter do not fit together,
        or one of them has what the layout has no place for or its readers would misread.
    """
    folder = export_place(out_dir)
    shape = _as_written(drafter.shape)
    _check_shape(shape)
    _check_target(shape, target, target_name)
    config = _config_of(shape, target, target_name, dtype)
    tensors = _tensors_of(drafter, shape, target.head, dtype)
    write_export(
        folder,
        config,
        tensors,
        lambda place: check_written(place, load_speculators(place).shape, shape, tensors),
        texts or {},
    )
    return folder


def serving_commands(folder: Path | str, drafter: DFlashDrafter, target_name: str) -> list[str]:
    """How to go on. vLLM can start from the folder alone, but then refuses a target that is no hub id."""
    return [
        f"next: paceline check {folder} --target {target_name}",
        f"eval: paceline eval --target {target_name} --draft {folder} --prompts FILE",
        vllm_command(folder, drafter, target_name),
    ]


def load_speculators(folder: Path | str) -> DFlashDrafter:
    """Read a released or exported folder: the drafter on the CPU, its weights in the type of the file.

    A folder that does not say how many layers the target has, as others than this project's do not, needs its target's
    configuration, from disk or the hub.
    Raises: ModelError if a file is missing or damaged, the drafter is of another kind, or its parts contradict.
    """
    folder = Path(folder)
    shape = _shape_of(read_config(folder, LAYOUT), folder / CONFIG_FILE)
    drafter, tensors = drafter_class(shape.kind)(shape), read_tensors(folder)
    own = drafter.state_dict()
    head_rows = shape.draft_vocab_size or shape.vocab_size
    expected = own | {
        "embed_tokens.weight": torch.empty(shape.vocab_size, shape.hidden_size, device="meta"),
        "lm_head.weight": torch.empty(head_rows, shape.hidden_size, device="meta"),
    }
    if shape.draft_vocab_size is not None:
        expected["t2d"] = torch.empty(shape.vocab_size, device="meta")
    optional = OF_TARGET if shape.draft_vocab_size is None else {"embed_tokens.weight"}
    check_tensors(tensors, expected, folder, optional)
    if shape.draft_vocab_size is not None:
        _check_draft_vocab(tensors["d2t"], tensors["t2d"], folder)
    drafter.load_state_dict({name: tensors[name] for name in own}, assign=True)
    return drafter


def is_speculators(folder: Path | str) -> bool:
    """Whether a folder looks like a drafter of this layout: its configuration has a `speculators_config`."""
    return has_layout(folder, LAYOUT)


def _as_written(shape: DraftShape) -> DraftShape:
    """The shape that the folder will read back as."""
    rope = {key: value for key, value in shape.rope.items() if value is not None and key != "type"}
    every = shape.draft_vocab_size == shape.vocab_size
    return dataclasses.replace(
        shape,
        rope={"rope_type": "default", **rope},
        is_causal=causality(shape),
        draft_vocab_size=None if every else shape.draft_vocab_size,
    )


def _check_shape(shape: DraftShape) -> None:
    """What the layout has no place for, or its readers would misread. Raises: ModelError."""
    head = shape.options.get("markov_head_type")
    if head is not None and head not in VLLM_MARKOV_HEADS:
        raise ModelError(
            f"draft.options.markov_head_type={head} cannot be exported as speculators: vLLM, which serves the layout, "
            f"has {' and '.join(VLLM_MARKOV_HEADS)} alone. Use --format zlab, of which SGLang builds every head, or "
            "train with markov_head_type=vanilla"
        )
    if shape.is_causal == "sliding":
        raise ModelError(
            "causal sliding layers beside bidirectional full ones (draft.is_causal=sliding) cannot be exported as "
            "speculators: vLLM takes the layout's flag for every layer. Use --format zlab"
        )
    if shape.is_causal and "full_attention" in shape.layer_types:
        raise ModelError(
            "draft.is_causal=true with full-attention layers cannot be exported as speculators: the layout says it of "
            "sliding layers alone, and full ones are read as bidirectional. Use --format zlab, or train with "
            "draft.is_causal=false or draft.layer_types=sliding"
        )
    _check_rope(shape.rope, "the drafter")
    check_drafter(shape, "the drafter", "target_layer_ids")


def _check_rope(rope: dict[str, Any], where: str) -> None:
    kind = rope["rope_type"]
    if kind not in ROPE_KEYS:
        raise ModelError(
            f"{where}: rotary positions of rope_type={kind!r}, which vLLM computes otherwise than Transformers; "
            f"{', '.join(ROPE_KEYS)} can be exported as speculators"
        )
    if unknown := sorted(rope.keys() - ROPE_KEYS[kind] - {"rope_type", "rope_theta"}):
        raise ModelError(f"{where}: vLLM does not read the rotary settings {unknown} of rope_type={kind!r}")


def _check_target(shape: DraftShape, target: Target, name: str) -> None:
    """Whether the target is the drafter's, and shares nothing but plain matrices. Raises: ModelError."""
    check_target(shape, target, name)
    beyond = {
        f"a soft cap of its logits ({target.head.softcap})": target.head.softcap is not None,
        f"a factor of its logits ({target.head.scale})": target.head.scale != 1.0,
        "a factor of its embedding": embedding_factor(shape, target) != 1.0,
    }
    for what, there in beyond.items():
        if there:
            raise ModelError(
                f"{name} has {what}, which the speculators layout has no place for: engines would draft without it. "
                "Use --format zlab, with a drafter over the full vocabulary that is no DSpark"
            )


def _config_of(shape: DraftShape, target: Target, target_name: str, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration, in the order in which it is written. A `model_type` at the top would hide it from vLLM."""
    kind = shape.kind
    place, architecture = Path(target_name).expanduser(), target.shape.architecture
    return {
        "architectures": [ARCHITECTURES[LAYOUT][kind]],
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "speculators_version": VERSION,
        "speculators_model_type": kind,
        ANCHOR_KEY: predicts_from_anchor(kind),
        LAYOUT_KEYS[LAYOUT]: {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_drafted(kind, shape.block_size),
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": str(place.resolve()) if place.exists() else target_name,
                "architectures": [] if architecture == "?" else [architecture],
            },
        },
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "draft_vocab_size": shape.draft_vocab_size or shape.vocab_size,
        "target_hidden_size": shape.hidden_size,
        "num_target_layers": shape.num_target_layers,
        # Counted as what enters a layer, of which number 0 is the embedding.
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layer_ids],
        "sliding_window_non_causal": not shape.is_causal,
        **{name: shape.options[name] for name in option_names(kind)},
        "transformer_layer_config": {
            "model_type": "qwen3",
            **{key: getattr(shape, key) for key in LAYER_KEYS},
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": list(shape.layer_types),
            "use_sliding_window": "sliding_attention" in shape.layer_types,
            "sliding_window": shape.sliding_window,
            # Unless this key says it, vLLM takes `sliding_window_non_causal` for every layer, and for none of DSpark's.
            "is_causal": shape.is_causal,
            # Only this form: in the configuration that vLLM makes of this, `rope_scaling` would overwrite it.
            "rope_parameters": dict(shape.rope),
        },
    }


def _tensors_of(drafter: DFlashDrafter, shape: DraftShape, head: Head, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
        if name != "d2t"
    }
    token_ids = drafter.draft_token_ids()
    if shape.draft_vocab_size is not None and token_ids is not None:
        tensors["lm_head.weight"] = head.rows(token_ids).weight.detach().to("cpu", dtype)
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
        tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    return tensors


def _check_draft_vocab(d2t: Tensor, t2d: Tensor, path: Path) -> None:
    """vLLM goes by `d2t`, `speculators` by `t2d`: they have to name the same tokens. Raises: ModelError."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise ModelError(f"{path}: d2t is {d2t.dtype} and t2d {t2d.dtype}; torch.int64 and torch.bool were wanted")
    token_ids = d2t + torch.arange(len(d2t))
    if token_ids[0] < 0 or token_ids[-1] >= len(t2d) or (token_ids.diff() <= 0).any():
        raise ModelError(f"{path}: i + d2t[i] are no ascending tokens of a vocabulary of {len(t2d)}")
    if int(t2d.sum()) != len(d2t):
        raise ModelError(f"{path}: t2d marks {int(t2d.sum())} tokens, d2t has {len(d2t)}")
    if not torch.equal(t2d.nonzero().flatten(), token_ids):
        raise ModelError(f"{path}: t2d marks other tokens than d2t leads to")


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The drafter kind that a configuration names; None: none that is known."""
    kind = str(config.get("speculators_model_type") or "dflash")
    return kind if kind in ARCHITECTURES[LAYOUT] else None


def known_keys(kind: str) -> set[str]:
    """Keys that may stand at the top level; others mean another kind of drafter."""
    return KNOWN_KEYS | set(option_names(kind))


def _shape_of(config: dict[str, Any], path: Path) -> DraftShape:
    """The drafter that a configuration describes. Raises: ModelError for what this drafter is not."""
    kind = kind_of(config)
    if kind is None:
        raise ModelError(
            f"{path}: speculators_model_type={config['speculators_model_type']!r}; one of "
            f"{', '.join(ARCHITECTURES[LAYOUT])} was wanted"
        )
    if unknown := sorted(config.keys() - known_keys(kind)):
        raise ModelError(f"{path} has {unknown}, which mean another kind of drafter")
    check_anchor((config,), kind, path)
    layer = wanted(config, "transformer_layer_config", path)
    check_fixed(layer, FIXED_LAYER_VALUES, path)
    plain = numbers(layer, LAYER_KEYS, path)
    check_fixed(config, {"target_hidden_size": plain["hidden_size"]}, path)
    vocab_size, draft_vocab_size = plain["vocab_size"], numbers(config, ["draft_vocab_size"], path)["draft_vocab_size"]
    if draft_vocab_size > vocab_size:
        raise ModelError(f"{path}: draft_vocab_size={draft_vocab_size} of a vocabulary of {vocab_size}")
    if draft_vocab_size < vocab_size and not drafter_class(kind).supports_draft_vocab:
        raise ModelError(
            f"{path}: draft_vocab_size={draft_vocab_size} of a vocabulary of {vocab_size}: a drafter of "
            f"draft.kind={kind} drafts from the whole vocabulary here"
        )
    layer_types = _layer_types_of(layer, path)
    rope = rope_of(layer, path)
    _check_rope(rope, str(path))
    shape = DraftShape(
        **plain,
        rope=rope,
        block_size=_block_size_of(config, kind, path),
        mask_token_id=token_id(config, "mask_token_id", path),
        target_layer_ids=tuple(i - 1 for i in layer_ids(config, "aux_hidden_state_layer_ids", path)),
        num_target_layers=_num_target_layers_of(config, path),
        layer_types=layer_types,
        is_causal=_causality_of(config, layer_types, path),
        sliding_window=wanted(layer, "sliding_window", path)
        if "sliding_attention" in layer_types
        else layer.get("sliding_window"),
        draft_vocab_size=None if draft_vocab_size == vocab_size else draft_vocab_size,
        kind=kind,
        options=options_of((config,), kind, path),
    )
    check_drafter(shape, str(path), "aux_hidden_state_layer_ids, which count one higher")
    return shape


def _block_size_of(config: dict[str, Any], kind: str, path: Path) -> int:
    """It has to hold what is drafted by default."""
    block_size, section = token_id(config, "block_size", path), config[LAYOUT_KEYS[LAYOUT]]
    check_fixed(section, {"algorithm": kind}, path)
    most = num_drafted(kind, block_size)
    for method in section.get("proposal_methods") or []:
        drafted = method.get("speculative_tokens", most)
        if drafted > most:
            raise ModelError(
                f"{path}: speculative_tokens={drafted} with block_size={block_size}, which has the anchor in it and "
                f"drafts {most}"
            )
    return int(block_size)


def _layer_types_of(layer: dict[str, Any], path: Path) -> tuple[str, ...]:
    if layer.get("layer_types") is None and not layer.get("use_sliding_window"):
        return ("full_attention",) * layer["num_hidden_layers"]
    return tuple(wanted(layer, "layer_types", path))


def _num_target_layers_of(config: dict[str, Any], path: Path) -> int:
    """As written, or the target's own. The layout does not have it, and other readers of it pass over the key."""
    if config.get("num_target_layers") is not None:
        return int(config["num_target_layers"])
    target = wanted(config[LAYOUT_KEYS[LAYOUT]].get("verifier") or {}, "name_or_path", path)
    try:
        return read_shape(target).num_layers
    except ModelError as error:
        raise ModelError(f"{path} has no num_target_layers, and {error}") from error


def _causality_of(config: dict[str, Any], layer_types: tuple[str, ...], path: Path) -> bool | Literal["sliding"]:
    """Attention inside a block: the flag is about sliding layers, and full ones are always bidirectional."""
    non_causal, is_causal = config.get("sliding_window_non_causal"), False
    if "sliding_attention" in layer_types:
        if non_causal is None:
            raise ModelError(
                f"{path} has no sliding_window_non_causal: `speculators` takes that for causal sliding layers, vLLM "
                "for bidirectional ones"
            )
        is_causal = not non_causal
    layer = config["transformer_layer_config"]
    if is_causal and "full_attention" in layer_types:
        if layer.get("is_causal") is not None:
            raise ModelError(
                f"{path}: sliding_window_non_causal=false means causal sliding layers beside bidirectional full ones, "
                f"and transformer_layer_config.is_causal={layer['is_causal']} is about every layer"
            )
        return "sliding"
    check_fixed(layer, {"is_causal": is_causal}, path)
    return is_causal
