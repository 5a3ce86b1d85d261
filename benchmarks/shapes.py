"""Targets and drafters of known shapes with random weights, made where they run, and the work that a step of them is.

Speed depends on shapes, not on weights, so benchmarks need no checkpoint: nothing is downloaded and no host copy
exists. Sizes are those of the published ``config.json`` files. Work is counted as the method's description counts it:
a multiplication and an addition are two, and only what the result depends on counts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.kinds import drafter_class
from paceline.models.loading import TargetShape, quiet_transformers, shape_of


def qwen3_8b() -> transformers.PretrainedConfig:
    """Qwen3-8B: 36 layers, 32/8 heads of 128; the work unit's target."""
    return _qwen3(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32)


def qwen3_0_6b() -> transformers.PretrainedConfig:
    """Qwen3-0.6B: 28 layers, 16/8 heads of 128, tied head."""
    return _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    )


def _qwen3(**sizes: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen3Config(
        vocab_size=151_936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        **sizes,
    )


def smollm2_135m() -> transformers.PretrainedConfig:
    """SmolLM2-135M: 30 layers, 9/3 heads of 64, tied head; so small that launches dominate."""
    return transformers.LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )


def qwen3_6_27b() -> transformers.PretrainedConfig:
    """Qwen3.6-27B's text part: 64 layers, every fourth with full attention, the others gated-delta."""
    return transformers.Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=262_144,
        rope_parameters=_mrope(10_000_000.0, [11, 11, 10]),
    )


def qwen3_30b_a3b() -> transformers.PretrainedConfig:
    """Qwen3-30B-A3B: 48 layers of 128 experts, 8 of them a token, 32/4 heads of 128."""
    return transformers.Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


def tiny_dense() -> transformers.PretrainedConfig:
    """Eight layers 64 wide: does a benchmark run at all?"""
    return transformers.Qwen3Config(
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}, num_hidden_layers=8, **_TINY
    )


def tiny_hybrid() -> transformers.PretrainedConfig:
    """`qwen3_6_27b` in small: two full-attention layers among eight."""
    return transformers.Qwen3_5TextConfig(
        num_hidden_layers=8,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope_parameters=_mrope(1_000_000.0, [1, 1, 0]),
        **_TINY,
    )


def tiny_moe() -> transformers.PretrainedConfig:
    """`qwen3_30b_a3b` in small: eight experts, two of them a token."""
    return transformers.Qwen3MoeConfig(
        num_hidden_layers=8,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        **_TINY,
    )


_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
}


def qwen3_235b_a22b() -> transformers.PretrainedConfig:
    """Qwen3-235B-A22B: 94 layers of 128 experts, 8 of them a token, 64/4 heads of 128; for plans, not for one card."""
    return transformers.Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


def llama_3_3_70b() -> transformers.PretrainedConfig:
    """Llama-3.3-70B: 80 layers, 64/8 heads of 128; for plans, not for one card."""
    return transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )


CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3-8b": qwen3_8b,
    "qwen3-0.6b": qwen3_0_6b,
    "smollm2-135m": smollm2_135m,
    "qwen3.6-27b": qwen3_6_27b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "qwen3-235b-a22b": qwen3_235b_a22b,
    "llama-3.3-70b": llama_3_3_70b,
    "tiny": tiny_dense,
    "tiny-hybrid": tiny_hybrid,
    "tiny-moe": tiny_moe,
}
"""Configurations by name, all layers counted; each call makes a new one."""


def _mrope(theta: float, sections: list[int]) -> dict[str, Any]:
    """Rotary settings of Qwen3.5 and later: a quarter of a head turns; for text all three axes hold one position."""
    return {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": 0.25,
        "mrope_section": sections,
        "mrope_interleaved": True,
    }


def target_shape(config: transformers.PretrainedConfig) -> TargetShape:
    """The whole target's shape, whatever part of it is built."""
    return shape_of(config, None)


def random_target(
    config: transformers.PretrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    num_layers: int | None = None,
    attention: str | None = None,
    seed: int = 0,
) -> Any:
    """A causal LM with random weights, every tensor made on the device in its type.

    Matrices are normal, of sizes as in trained models, norms neutral; gated-delta layers decay slowly enough that a
    document which leaked into the next would show. The language-model head is there, as the drafter shares it.

    Args:
        config: Left as it is.
        num_layers: First layers built (last tap + 1); None: all.
        attention: Transformers' attention implementation; None: the library's choice.
        seed: Of the device's own generator: other kinds of device give other weights.
    """
    config = copy.deepcopy(config)
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):  # some versions build a cache layer per entry
            config.layer_types = config.layer_types[:num_layers]
    kwargs = {} if attention is None else {"attn_implementation": attention}
    with quiet_transformers(), torch.device(device), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    model.tie_weights()
    _fill(model, torch.Generator(device).manual_seed(seed))
    return model.requires_grad_(False).eval()


RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "experts.down_proj")
"""Matrices whose products are added to the residual stream."""


@torch.no_grad()
def _fill(model: nn.Module, generator: torch.Generator) -> None:
    """Weights of a size that a trained model's have: with all matrices alike, rounding errors grow so much
    from layer to layer that a comparison of fp8 features says nothing."""
    parameters = dict(model.named_parameters())  # a tied weight comes once
    num_layers = max(1, sum(name.endswith("down_proj.weight") for name in parameters))
    is_tied = not any(name.startswith("lm_head") for name in parameters)
    for name, parameter in parameters.items():
        if parameter.dim() > 1:
            std = 0.02
            if name.endswith(RESIDUAL_OUTPUTS):
                std = 0.02 / math.sqrt(2 * num_layers)
            elif name.endswith("embed_tokens.weight") and not is_tied:
                std = 1.0
            parameter.normal_(0.0, std, generator=generator)
        elif name.endswith("A_log"):
            parameter.uniform_(0.01, 1.0, generator=generator).log_()
        elif name.endswith("bias") and not name.endswith("dt_bias"):
            parameter.zero_()  # its constructor left it to the initialisation that was skipped


def draft_shape(
    target: TargetShape,
    layer_ids: Sequence[int],
    *,
    num_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    num_layers: int = 5,
    block_size: int = 16,
) -> DraftShape:
    """A drafter of the target's width and vocabulary; heads are the target's own unless given."""
    rope = {key: value for key, value in target.rope.items() if not key.startswith(("partial_rotary", "mrope"))}
    return DraftShape(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads or target.num_attention_heads,
        num_key_value_heads=num_key_value_heads or target.num_key_value_heads,
        head_dim=head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope=rope,
        block_size=block_size,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=tuple(layer_ids),
        num_target_layers=target.num_layers,
        layer_types=("full_attention",) * num_layers,
    )


@torch.no_grad()
def random_drafter(shape: DraftShape, device: torch.device | str, seed: int = 0) -> DFlashDrafter:
    """A float32 drafter with random weights, made on the device: `DFlashDrafter.initialise` draws on the host."""
    with torch.device(device), no_init_weights():
        drafter = drafter_class(shape.kind)(shape)
    _fill(drafter, torch.Generator(device).manual_seed(seed))
    return drafter


# ------------------------------------------------------------------ useful work, in FLOP


def target_work(config: transformers.PretrainedConfig, num_layers: int, lengths: Sequence[int]) -> dict[str, float]:
    """What the first layers of a target do for a row of documents: ``matmul``, and what mixes tokens: ``attention``.

    Of a mixture of experts the experts of a token count. Attention is causal, inside documents; a gated-delta layer
    counts as the recurrence that it is (its chunked form does a quarter more).
    """
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_layers
    types = (getattr(config, "layer_types", None) or ["full_attention"] * num_layers)[:num_layers]
    config.layer_types = types
    with quiet_transformers(), torch.device("meta"):
        layers = transformers.AutoModelForCausalLM.from_config(config).get_decoder().layers
    used = getattr(config, "num_experts_per_tok", 0) / max(1, getattr(config, "num_experts", 0) or 1)
    active = sum(
        p.numel() * (used if p.dim() == 3 and "experts" in name else 1) for name, p in layers.named_parameters()
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = sum(n * n / 2 for n in lengths)  # of a token and what it attends to
    full = 4 * config.num_attention_heads * head_dim * pairs * types.count("full_attention")
    linear = 0.0
    if "linear_attention" in types:  # a state of key x value entries: decayed, read, corrected, read again
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        linear = 7 * state * sum(lengths) * types.count("linear_attention")
    return {"matmul": 2 * active * sum(lengths), "attention": full + linear}


def draft_work(shape: DraftShape, lengths: Sequence[int], num_anchors: int) -> dict[str, float]:
    """Forward and backward of a drafter over a row whose every token is supervised: ``matmul`` and ``attention``.

    Anchors lie anywhere in their documents, so that a block sees half of its document on average.
    """
    width, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    tokens, rows = sum(lengths), num_anchors * shape.block_size
    predicted = num_anchors * (shape.block_size - 1)
    layer = 2 * width * queries + 2 * width * keys + 3 * width * shape.intermediate_size
    context = sum(n * n for n in lengths) / tokens / 2
    matmul = 6 * shape.num_hidden_layers * layer * rows  # forward once, backward twice
    matmul += 4 * len(shape.target_layer_ids) * width**2 * tokens  # fc: its input takes no gradient
    matmul += 12 * shape.num_hidden_layers * width * keys * tokens  # keys and values of the context
    matmul += 4 * width * shape.vocab_size * predicted  # the head is frozen
    attention = 12 * queries * (context + shape.block_size) * shape.num_hidden_layers * rows
    return {"matmul": matmul, "attention": attention}
