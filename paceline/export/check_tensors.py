"""The tensors of a drafter's folder against those that its configuration means: names, shapes, types."""

from __future__ import annotations

from typing import Any

from paceline.export import speculators
from paceline.export.findings import DraftFolder
from paceline.export.folder import LAYER_KEYS, option_names
from paceline.models.loading import TargetShape

LAYER_TENSORS = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)

MISSING_TENSOR = (
    "vLLM leaves its memory uninitialised and SGLang does not look, both without a word; `speculators` fills in random "
    "numbers and prints a report: the acceptance falls"
)


def check_tensors(seen: DraftFolder, target: TargetShape) -> None:
    """Add what is missing, left over, or of another shape or type."""
    wanted = _wanted_tensors(seen)
    if wanted is None:
        return
    optional = _optional_tensors(seen, target)
    for name, shape in wanted.items():
        if name not in seen.tensors:
            seen.error(name, "missing", shape, MISSING_TENSOR, "tensors")
    for name, (shape, _) in sorted(seen.tensors.items()):
        if name in optional:
            if shape != optional[name]:
                seen.error(name, shape, optional[name], "engines refuse the shape", "tensors")
            elif name in speculators.OF_TARGET and not _has_draft_vocab(seen):
                seen.warn(name, "a copy", "none: the target's is used", "vLLM holds it a second time", "tensors")
        elif name not in wanted:
            seen.error(
                name, "unexpected", "no such tensor",
                "vLLM refuses the folder; SGLang skips it without a word, and with it what it was meant for", "tensors",
            )  # fmt: skip
        elif shape != wanted[name]:
            seen.error(name, shape, wanted[name], "engines refuse the shape", "tensors")
    _check_dtypes(seen)


def _wanted_tensors(seen: DraftFolder) -> dict[str, list[int]] | None:
    """Names and shapes that the configuration means; None where it does not say enough."""
    numbers: dict[str, Any] = {key: seen.layer.get(key) for key in LAYER_KEYS}
    taps = seen.section.get("target_layer_ids") if seen.is_zlab else seen.config.get("aux_hidden_state_layer_ids")
    if not isinstance(taps, list) or any(type(numbers[key]) is not int for key in LAYER_KEYS[:6]):
        return None
    hidden, inner, layers, heads, kv_heads, head_dim = (int(numbers[key]) for key in LAYER_KEYS[:6])
    attention, keys = heads * head_dim, kv_heads * head_dim
    shapes = dict(zip(
        LAYER_TENSORS,
        [[hidden], [hidden], [attention, hidden], [keys, hidden], [keys, hidden], [hidden, attention],
         [head_dim], [head_dim], [inner, hidden], [inner, hidden], [hidden, inner]],
        strict=True,
    ))  # fmt: skip
    wanted = {"fc.weight": [hidden, len(taps) * hidden], "hidden_norm.weight": [hidden], "norm.weight": [hidden]}
    wanted |= {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in shapes.items()}
    wanted |= _own_tensors(seen, hidden, layers)
    if _has_draft_vocab(seen):
        size = seen.config["draft_vocab_size"]
        wanted |= {"d2t": [size], "t2d": [seen.layer["vocab_size"]], "lm_head.weight": [size, hidden]}
    return wanted


def _own_tensors(seen: DraftFolder, hidden: int, layers: int) -> dict[str, list[int]]:
    """Names and shapes of what only this kind has; none where its options do not say enough."""
    options: dict[str, Any] = {name: seen.section.get(name, seen.config.get(name)) for name in option_names(seen.kind)}
    vocab_size = seen.layer.get("vocab_size")
    if any(value is None for value in (vocab_size, *options.values())):
        return {}
    if seen.kind == "dflash2":
        taps, group, rank = (options[name] for name in ("conv_kernel_size", "conv_group_size", "selector_rank"))
        wanted = {
            "candidate_selector.predecessor_codebook": [vocab_size, rank],
            "candidate_selector.successor_codebook": [vocab_size, rank],
            "candidate_selector.hidden_projection.weight": [rank, hidden],
        }
        for place in (f"layers.{i}.{name}_conv" for i in range(layers) for name in ("attention", "mlp")):
            wanted[f"{place}.base_kernel"] = [2, taps, hidden]
            wanted[f"{place}.kernel_projection.weight"] = [2 * taps * (hidden // group), hidden]
        return wanted
    if seen.kind == "dspark":
        rank, head = options["markov_rank"], options["markov_head_type"]
        wanted = {
            "markov_head.markov_w1.weight": [vocab_size, rank],
            "markov_head.markov_w2.weight": [vocab_size, rank],
        }
        if head == "gated":
            wanted |= {"markov_head.gate_proj.weight": [rank, hidden + rank], "markov_head.gate_proj.bias": [rank]}
        if head == "rnn":
            joint = [3 * rank, 2 * rank + hidden]
            wanted |= {"markov_head.joint_proj.weight": joint, "markov_head.joint_proj.bias": [3 * rank]}
        if options["enable_confidence_head"]:
            width = hidden + (rank if options["confidence_head_with_markov"] else 0)
            wanted |= {"confidence_head.proj.weight": [1, width], "confidence_head.proj.bias": [1]}
        return wanted
    return {}


def _optional_tensors(seen: DraftFolder, target: TargetShape) -> dict[str, list[int]]:
    """Copies of the target's, which engines take."""
    copies = [target.vocab_size, target.hidden_size]
    names = {"embed_tokens.weight": copies}
    return names if _has_draft_vocab(seen) else {**names, "lm_head.weight": copies}


def _has_draft_vocab(seen: DraftFolder) -> bool:
    size = seen.config.get("draft_vocab_size")
    return not seen.is_zlab and type(size) is int and size != seen.layer.get("vocab_size")


def _check_dtypes(seen: DraftFolder) -> None:
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    kinds: dict[str, list[str]] = {}
    for name, (_, dtype) in seen.tensors.items():
        if name not in ("d2t", "t2d"):
            kinds.setdefault(names.get(dtype, dtype), []).append(name)
    said = seen.config.get("dtype", seen.config.get("torch_dtype"))
    for dtype, tensors in sorted(kinds.items()):
        others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        if dtype not in names.values():
            seen.error(tensors[0], f"{dtype}{others}", "a floating type", "it holds no weights", "tensors")
        elif said is not None and dtype != said:
            seen.error(
                f"{tensors[0]}{others}", dtype, f"{said}, as `dtype` says",
                "every engine casts it in silence: what is served is not what was measured", "tensors",
            )  # fmt: skip
