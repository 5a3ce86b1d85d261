"""A target in a GGUF file: its configuration, and its weights as a state dict of the plain ones.

Transformers reads such files too (``gguf_file=``), but not well enough (5.17 and 5.24): it needs accelerate, holds all
weights at once, splits text in ways that differ between its versions, and leaves out scaled rotary frequencies (Llama
3.1's, YaRN), Qwen3's head size and all ends but one without a word. Here a family is read whole, or refused by the key
or tensor that is not understood.
Source: llama.cpp's ``convert_hf_to_gguf.py`` for what it does to weights.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.errors import ModelError
from paceline.gguf_file import GGUFFile
from paceline.models.dequantize import LazyTensor

_FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""llama.cpp's name -> Transformers' name and class. Mistral's models are ``llama`` too."""

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_OTHER_KEYS = {
    *("vocab_size", "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
}
_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_NEEDED = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"),
    "attention.layer_norm_rms_epsilon",
)

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
"""GGUF name -> Transformers' name; ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``."""

_FACTORS = "rope_freqs.weight"
_INSTEAD = "take the checkpoint in safetensors"


def read_configs(file: GGUFFile) -> tuple[Any, Any]:
    """Configuration and generation settings as Transformers has them. Raises: ModelError."""
    family = file.architecture
    if family not in _FAMILIES:
        raise ModelError(f"target {file.path} is a {family}; of GGUF files {', '.join(_FAMILIES)} are read: {_INSTEAD}")
    experts = _EXPERTS if family == "qwen3moe" else ()
    own = {
        key.removeprefix(f"{family}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{family}.") and (experts or value != 0 or "expert_" not in key)  # files may say: no experts
    }
    known = {*_KEYS, *_OTHER_KEYS} - ({*_EXPERTS} - {*experts})
    if strange := sorted(own.keys() - known):
        raise ModelError(f"target {file.path} says {family}.{strange[0]}, which is not read here: {_INSTEAD}")
    if missing := [key for key in (*_NEEDED, *experts) if key not in own]:
        raise ModelError(f"target {file.path} has no {family}.{missing[0]}")
    if lists := [key for key, value in own.items() if isinstance(value, list)]:
        raise ModelError(f"target {file.path} has {family}.{lists[0]} of its own for each layer: {_INSTEAD}")
    heads = own["attention.head_count"]
    own.setdefault("attention.head_count_kv", heads)
    own.setdefault("attention.key_length", own["embedding_length"] // heads)
    head_dim = own["attention.key_length"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ModelError(
                f"target {file.path} has heads of {head_dim}, and {family}.{key} is {own[key]}: {_INSTEAD}"
            )
    fields = {_KEYS[key]: value for key, value in own.items() if key in _KEYS}
    bos, pad = (file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "padding"))
    stops = list(file.stop_ids)
    fields |= {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        # The file keeps float32(1e-5), which prints as 9.999999747378752e-06; in float32 they are one number.
        "rms_norm_eps": _shortest(own["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rope(file, own),
        "bos_token_id": bos,
        "pad_token_id": pad,
        "eos_token_id": stops[0] if stops else None,
    }
    if family == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if family == "qwen3moe":  # llama.cpp has no key for these
        fields |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    model_type, class_name = _FAMILIES[family]
    config = transformers.AutoConfig.for_model(model_type, architectures=[class_name], **fields)
    if _FACTORS in file.tensors:
        config.rope_parameters = _with_factors(file, config)
    ends = stops if len(stops) > 1 else fields["eos_token_id"]
    generation = transformers.GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=pad)
    return config, generation


def open_gguf_weights(file: GGUFFile) -> tuple[dict[str, Any], str, int]:
    """State dict whose tensors are read and dequantised, to float32, when they are indexed.

    Returns: tensors by Transformers' names, the types that the file has them in, and how many were quantised.
    Raises: ModelError naming a tensor that is not known.
    """
    heads = file.metadata.get("llama.attention.head_count")
    groups = file.metadata.get("llama.attention.head_count_kv", heads)
    weights: dict[str, Any] = {}
    for name in file.tensors:
        *block, key, last = name.split(".")
        prefix = f"model.layers.{block[1]}." if len(block) == 2 else ""
        if name == _FACTORS or key == "ffn_gate_exps":
            continue
        if key in ("ffn_up_exps", "ffn_down_exps"):
            up = name.replace("_up_", "_gate_"), name
            parts, target = ((name,), "down_proj") if key == "ffn_down_exps" else (up, "gate_up_proj")
            if missing := [part for part in parts if part not in file.tensors]:
                raise ModelError(f"target {file.path} has {name} and no {missing[0]}")
            weights[f"{prefix}mlp.experts.{target}"] = LazyTensor(partial(_joined, file, parts))
        elif key not in _TENSORS or last not in ("weight", "bias"):
            raise ModelError(f"target {file.path} has the tensor {name}, which is not read here: {_INSTEAD}")
        else:
            pairs = {"attn_q": heads, "attn_k": groups}.get(key) if file.architecture == "llama" else None
            weights[f"{prefix}{_TENSORS[key]}.{last}"] = LazyTensor(partial(_read, file, name, pairs))
    quantized = Counter(each.kind.name for each in file.tensors.values() if each.is_quantized)
    kinds = quantized or Counter(each.kind.name for each in file.tensors.values() if len(each.shape) > 1)
    return weights, ", ".join(kind for kind, _ in kinds.most_common()), quantized.total()


def _read(file: GGUFFile, name: str, num_heads: int | None) -> torch.Tensor:
    """A tensor; with `num_heads` its rows from llama.cpp's order, in which rotary pairs are side by side, to that of
    Transformers, in two halves of a head."""
    weight = torch.from_numpy(file.read(name))
    if num_heads is None:
        return weight
    return weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _joined(file: GGUFFile, names: tuple[str, ...]) -> torch.Tensor:
    """Experts ``[E, out, in]``, of gate and up one behind the other."""
    return torch.cat([torch.from_numpy(file.read(name)) for name in names], dim=1)


def _shortest(value: float) -> float:
    """The shortest number that is this one in float32."""
    return float(str(np.float32(value)))


def _rope(file: GGUFFile, own: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings, but for frequencies that the file has as a tensor."""
    rope = {"rope_type": "default", "rope_theta": _shortest(own.get("rope.freq_base", 10000.0))}  # the format's default
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn") or "rope.scaling.factor" not in own:
        raise ModelError(f"target {file.path} has rotary frequencies scaled as {kind!r}: {_INSTEAD}")
    rope |= {"rope_type": kind, "factor": _shortest(own["rope.scaling.factor"])}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = own.get(
            "rope.scaling.original_context_length", own["context_length"]
        )
    return rope


def _with_factors(file: GGUFFile, config: Any) -> dict[str, Any]:
    """Rotary settings of Llama 3.1 and later: the file has what they divide frequencies by, and not what they are.

    Raises: ModelError if the settings that all of these models have, with the file's factor, give others.
    """
    found = file.read(_FACTORS)
    plain = config.rope_parameters
    scaled = plain | {
        "rope_type": "llama3",
        "factor": _shortest(found.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config.rope_parameters = scaled
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    wanted = 1.0 / (plain["rope_theta"] ** exponents) / frequencies
    if plain["rope_type"] != "default" or found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-4):
        raise ModelError(f"target {file.path} divides rotary frequencies in a way that is not Llama 3's: {_INSTEAD}")
    return scaled
