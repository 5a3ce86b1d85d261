"""A DFlash drafter for Transformers: `AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`.

This file is copied beside the weights as it is, so it needs torch and Transformers alone. It computes what the block
diffusion drafter of "DFlash" (arXiv:2602.06036) computes: slot 0 of a block is the last token of the target, the others
hold the mask token, and slot k's hidden state predicts the token k places after slot 0, by the target's own head.
Shape letters: B sequences, C context tokens, K block size, L tapped layers of the target, D hidden size.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Config,
    Qwen3MLP,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)


class DFlashAttention(nn.Module):
    """Slots attend to the context and to their own block; context and block share key and value weights."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        size, width = config.head_dim, config.hidden_size
        self.head_dim = size
        slides = config.layer_types[layer] == "sliding_attention"
        self.window = config.sliding_window if slides else None
        self.is_causal = getattr(config, "is_causal", slides)  # not written where sliding layers alone are causal
        self.q_proj = nn.Linear(width, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, width, bias=False)
        self.q_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, N, heads * H]`` to ``[B, N, heads, H]``."""
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: torch.Tensor, context: torch.Tensor, angles: tuple, positions: torch.Tensor) -> torch.Tensor:
        both, num_slots = torch.cat([context, x], dim=1), x.shape[1]
        query = self.q_norm(self.heads(self.q_proj(x))).transpose(1, 2)
        key = self.k_norm(self.heads(self.k_proj(both))).transpose(1, 2)
        value = self.heads(self.v_proj(both)).transpose(1, 2)
        cos, sin = angles
        query, _ = apply_rotary_pos_emb(query, query, cos[:, -num_slots:], sin[:, -num_slots:])
        key, _ = apply_rotary_pos_emb(key, key, cos, sin)
        ahead = positions[:, None, -num_slots:, None] - positions[:, None, None, :]  # query - key, [B, 1, K, C + K]
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if self.window is not None:
            visible = ahead.abs() < self.window
        if self.is_causal:
            visible = visible & (ahead >= 0)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class DFlashLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: torch.Tensor, context: torch.Tensor, angles: tuple, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, angles, positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraftModel(Qwen3PreTrainedModel):
    config_class = Qwen3Config
    _no_split_modules = ["DFlashLayer"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        draft = config.dflash_config
        self.block_size: int = draft["block_size"]
        self.mask_token_id: int = draft["mask_token_id"]
        self.target_layer_ids: list[int] = draft["target_layer_ids"]
        self.fc = nn.Linear(len(self.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.post_init()

    def context_feature(self, hidden_states: tuple) -> torch.Tensor:
        """The tapped layers' outputs ``[B, C, L*D]`` of the target's `hidden_states`; entry 0 is the embedding."""
        return torch.cat([hidden_states[i + 1] for i in self.target_layer_ids], dim=-1)

    def forward(
        self, noise_embedding: torch.Tensor, target_hidden: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states of a block's slots, for the target's head.

        Args:
            noise_embedding: ``[B, K, D]``, the target's embedding of the block: its last token, then masks.
            target_hidden: ``[B, C, L*D]`` of all tokens before the block, from `context_feature`.
            position_ids: ``[B, C + K]``; by default 0 to C + K - 1.
        Returns: ``[B, K, D]``.
        """
        if position_ids is None:
            length = target_hidden.shape[1] + noise_embedding.shape[1]
            position_ids = torch.arange(length, device=noise_embedding.device)[None]
        context = self.hidden_norm(self.fc(target_hidden))
        angles = self.rotary_emb(noise_embedding, position_ids)
        x = noise_embedding
        for layer in self.layers:
            x = layer(x, context, angles, position_ids)
        return self.norm(x)
