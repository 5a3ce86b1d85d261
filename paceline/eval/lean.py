"""A plain float32 model's forward on a CPU without the model around it.

One token through SmolLM2-135M takes 47 ms in Transformers with packed linear layers, six take 51 (one thread of an EPYC
Zen 4). The products are 28 of them, and the rest is what stands around: modules, hooks, masks, a cache that grows by
copying. Here a layer is two dozen calls: joined projections packed for oneDNN, keys and values written into reserved
room, rotary tables made once. One token takes 38 ms and six take 39, so drafted blocks gain a little as well.

It is used only where it does what the model does, see `eval.structure`.
Shape letters: n tokens appended, R rows (n, at least `MIN_ROWS`), D hidden, N query heads, M key/value heads, H head
size, C capacity in positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.eval.forwards import Tokens
from paceline.eval.structure import structure_obstacle
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.packed_linear import MIN_ROWS, JoinedLinear, PackedHead, is_too_large

LEAN = "lean float32 forward, weights packed for oneDNN"
"""What `CachedTarget.kernel` says of this forward."""

INITIAL_CAPACITY = 512
"""Positions reserved at first; doubled when they run out."""


@dataclass(frozen=True)
class _Layer:
    """Weights of one decoder layer. `head_norm` is ``[N + M, H]``, of the query heads and then the key heads."""

    input_norm: Tensor
    qkv: JoinedLinear
    head_norm: Tensor | None
    out: JoinedLinear
    post_norm: Tensor
    gate_up: JoinedLinear
    down: JoinedLinear

    @classmethod
    def of(cls, layer: Any, num_heads: int, num_kv_heads: int) -> _Layer:
        """Pack copies of a Transformers layer's weights."""
        attention, mlp = layer.self_attn, layer.mlp
        head_norm = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm.weight] * num_heads + [attention.k_norm.weight] * num_kv_heads
            head_norm = torch.stack(norms).detach()
        return cls(
            layer.input_layernorm.weight.detach(),
            JoinedLinear.of(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norm,
            JoinedLinear.of(attention.o_proj),
            layer.post_attention_layernorm.weight.detach(),
            JoinedLinear.of(mlp.gate_proj, mlp.up_proj),
            JoinedLinear.of(mlp.down_proj),
        )


class LeanForward:
    """The `Forward` of a model that has no `obstacle`: its embedding, norms and rotary tables, and packed projections.

    The projections' own weights are not kept. (Where the model's file is mapped rather than read they stay mapped with
    the embedding, as pages that the system takes back when it needs them.)
    """

    def __init__(self, model: Any, head: Head, layer_ids: Sequence[int]) -> None:
        trunk = model.get_decoder()
        attention = trunk.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._scale: float = attention.scaling
        self._eps: float = trunk.norm.variance_epsilon
        self._embedding: Tensor = trunk.embed_tokens.weight.detach()
        self._norm: Tensor = trunk.norm.weight.detach()
        self._head = head
        self._rotary: nn.Module = trunk.rotary_emb
        self._layers = [_Layer.of(layer, self._num_heads, self._num_kv_heads) for layer in trunk.layers]
        self._place_of = {layer: place for place, layer in enumerate(layer_ids)}
        self.taps: list[Tensor] = [torch.empty(0)] * len(layer_ids)
        self._keys: list[Tensor] = [torch.empty(1, self._num_kv_heads, 0, self._head_dim) for _ in self._layers]
        self._values = list(self._keys)
        self._cos = self._sin = torch.empty(0)
        self._capacity = self._base = self._length = 0
        self._reserve(INITIAL_CAPACITY)

    def clear(self) -> None:
        """Start a new sequence."""
        self._length = 0

    @torch.no_grad()
    def append(self, tokens: Tokens, last_only: bool = False) -> Tensor:
        """Run tokens behind the sequence; logits ``[n, V]`` after each of them, or ``[1, V]`` after the last.

        Few tokens are filled up to `MIN_ROWS`. What the filling leaves behind the sequence no token sees, and the next
        call writes over it.
        """
        num_tokens = len(tokens)
        num_rows = max(num_tokens, MIN_ROWS)
        start, end = self._length, self._length + num_rows
        self._base, self._length = start, start + num_tokens
        self._reserve(end)
        mask = None  # without a past the attention's own causal rule is the same and quicker
        if start:
            mask = torch.full((num_rows, end), float("-inf")).triu(start + 1)
        cos, sin = self._cos[start:end], self._sin[start:end]
        x = F.embedding(torch.tensor([*tokens, *[tokens[-1]] * (num_rows - num_tokens)]), self._embedding)  # [R, D]
        for i, layer in enumerate(self._layers):
            x = x + layer.out(self._attend(i, layer, self._normed(x, layer.input_norm), cos, sin, start, mask))
            gate, up = layer.gate_up(self._normed(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
            if i in self._place_of:
                self.taps[self._place_of[i]] = x[:num_tokens]
        x = x[num_tokens - 1 if last_only else 0 : num_tokens]
        return self._head.logits(self._normed(x, self._norm))

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens last appended; at least one stays."""
        self._length = self._base + num_tokens

    def reserve(self, num_positions: int, num_tokens: int) -> None:
        """Nothing: room is made when it is needed."""

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _attend(
        self, i: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, start: int, mask: Tensor | None
    ) -> Tensor:
        """Write keys and values of rows ``[R, D]`` from position `start` on, and attend: ``[R, N*H]``."""
        num_rows, num_heads, num_kv = x.shape[0], self._num_heads, self._num_kv_heads
        heads = layer.qkv(x).view(num_rows, num_heads + 2 * num_kv, self._head_dim)
        rotated = heads.narrow(1, 0, num_heads + num_kv)  # queries and keys, [R, N + M, H]
        if layer.head_norm is not None:
            rotated = F.rms_norm(rotated, rotated.shape[2:], None, self._eps) * layer.head_norm
        first, second = rotated.chunk(2, dim=2)
        rotated = (rotated * cos).addcmul_(torch.cat([second, first], dim=2), sin).transpose(0, 1)[None]
        keys, values = self._keys[i], self._values[i]
        keys.narrow(2, start, num_rows).copy_(rotated.narrow(1, num_heads, num_kv))
        values.narrow(2, start, num_rows).copy_(heads.narrow(1, num_heads + num_kv, num_kv).transpose(0, 1))
        attended = F.scaled_dot_product_attention(
            rotated.narrow(1, 0, num_heads),
            keys.narrow(2, 0, start + num_rows),
            values.narrow(2, 0, start + num_rows),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).reshape(num_rows, num_heads * self._head_dim)

    def _reserve(self, num_positions: int) -> None:
        """Make room for so many positions, at least doubling it, and keep what is there."""
        if num_positions <= self._capacity:
            return
        self._capacity = max(num_positions, 2 * self._capacity)
        with torch.inference_mode(False):  # room made in this mode could not be written outside it
            self._keys = [self._grown(keys) for keys in self._keys]
            self._values = [self._grown(values) for values in self._values]
            positions = torch.arange(self._capacity)[None]
            cos, sin = self._rotary(torch.empty(0), positions)  # [1, C, H] each; the first argument gives the type
            first, second = sin.transpose(0, 1).chunk(2, dim=-1)  # [C, 1, H/2] each
            self._cos, self._sin = cos.transpose(0, 1), torch.cat([-first, second], dim=-1)

    def _grown(self, room: Tensor) -> Tensor:
        grown = room.new_empty(1, self._num_kv_heads, self._capacity, self._head_dim)
        grown[:, :, : room.shape[2]] = room
        return grown


def obstacle(model: Any, head: Head) -> str | None:
    """Why the lean forward cannot stand in for a model, in one line, as far as its structure tells; None: it can.

    Args:
        head: From `pack_head`.
    """
    weight = head.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        name = str(weight.dtype).removeprefix("torch.")
        return f"the lean one wants float32 on a CPU, this is {name} on {weight.device.type}"
    if not isinstance(head, PackedHead):
        return "this build of PyTorch has no product with weights packed for oneDNN"
    if is_too_large(model):
        return "the model is too large to be packed"
    return structure_obstacle(model, torch.float32)
