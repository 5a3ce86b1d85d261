"""A plain model's forward for a GPU: reserved room, compiled layers, every call replayed from a CUDA graph.

One token through a small model is some thousand kernels in Transformers, each shorter than the time it takes to launch;
measured so, a drafter would be compared with the launching of kernels. Here keys and values are written into room at
fixed addresses, a call's rows are filled up to one of a few widths, and the whole call is one graph. On a CPU the same
code runs as it is: the reference of the tests.

It is used only where it does what the model does, see `eval.structure`. Shape letters: n tokens appended, R rows (n,
filled up to a width), D hidden, N query heads, M key/value heads, H head size, C capacity in positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.eval.forwards import Tokens
from paceline.eval.structure import structure_obstacle
from paceline.kernels.compiled import run_compiled_any_size
from paceline.kernels.graphs import RECORDING_CALLS, GraphRunner
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.static_attention import BUCKET, attend_static, bucket_of
from paceline.models.draft import Angles, Call, call, rotate

STATIC = "own forward, compiled and replayed from CUDA graphs"
"""What `CachedTarget.kernel` says of this forward."""

WIDTHS = (1, 8, 16, 32, 64)
"""Rows of a graph that gives the logits of all its rows."""

PROMPT_WIDTHS = (64, 128, 256, 512)
"""Rows of a graph that starts a sequence, and gives the logits of the last. What is longer is launched kernel by
kernel: then launching no longer shows."""


def width_of(num_tokens: int, widths: Sequence[int] = WIDTHS) -> int | None:
    """Rows of the graph that takes so many tokens; None: there is none."""
    return next((width for width in widths if width >= num_tokens), None)


class _Layer(nn.Module):
    """One decoder layer with the weights of a Transformers layer; those that read the same input are joined.

    The Transformers layer's own become views of the joined ones, so that none is held twice.
    """

    def __init__(self, layer: Any, eps: float) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim: int = attention.head_dim
        self.num_kv_heads: int = attention.k_proj.out_features // self.head_dim
        self.num_heads: int = attention.q_proj.out_features // self.head_dim
        self.eps = eps
        self.input_norm = _frozen(layer.input_layernorm.weight)
        self.qkv, self.qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        has_norms = hasattr(attention, "q_norm")
        self.query_norm = _frozen_if_any(attention.q_norm.weight if has_norms else None)
        self.key_norm = _frozen_if_any(attention.k_norm.weight if has_norms else None)
        self.out, self.out_bias = _frozen(attention.o_proj.weight), _frozen_if_any(attention.o_proj.bias)
        self.post_norm = _frozen(layer.post_attention_layernorm.weight)
        self.gate_up, self.gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
        self.down, self.down_bias = _frozen(mlp.down_proj.weight), _frozen_if_any(mlp.down_proj.bias)

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Query ``[R, N, H]``, key and value ``[R, M, H]`` of rows ``[R, D]``, rotated."""
        heads = F.linear(self._normed(x, self.input_norm), self.qkv, self.qkv_bias).unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self._normed(query, self.query_norm), self._normed(key, self.key_norm)
        return rotate(query, angles), rotate(key, angles), value

    def complete(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output ``[R, D]`` from its input and what its heads attended to, ``[R, N, H]``."""
        x = x + F.linear(attended.flatten(1), self.out, self.out_bias)
        gate, up = F.linear(self._normed(x, self.post_norm), self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down, self.down_bias)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


def _frozen_if_any(weight: Tensor | None) -> nn.Parameter | None:
    return None if weight is None else _frozen(weight)


def _joined(*layers: nn.Linear) -> tuple[nn.Parameter, nn.Parameter | None]:
    weight = torch.cat([layer.weight.detach() for layer in layers])
    sizes = [layer.out_features for layer in layers]
    for layer, part in zip(layers, weight.split(sizes), strict=True):
        layer.weight.data = part
    if all(layer.bias is None for layer in layers):
        return _frozen(weight), None
    biases = [weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
    return _frozen(weight), _frozen(torch.cat(biases))


class StaticTrunk:
    """What every forward of our own has of a model that has no `obstacle`: its joined weights, angles and head."""

    def __init__(self, model: Any, head: Head) -> None:
        trunk = model.get_decoder()
        attention = trunk.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._scale: float = attention.scaling
        self._eps: float = trunk.norm.variance_epsilon
        self._embedding: Tensor = trunk.embed_tokens.weight.detach()
        self._norm: Tensor = trunk.norm.weight.detach()
        self._head = head
        self._rotary: nn.Module = trunk.rotary_emb
        self._layers = [_Layer(layer, self._eps) for layer in trunk.layers]
        self._device, self._dtype = self._embedding.device, self._embedding.dtype
        self._is_on_gpu = self._device.type == "cuda"
        self._call: Call = run_compiled_any_size if self._is_on_gpu else call

    def _logits(self, x: Tensor) -> Tensor:
        return self._head.logits(F.rms_norm(x, self._norm.shape, self._norm, self._eps))

    def _angles(self, num_positions: int) -> Angles:
        """Cosine and sine of all positions, ``[C, 1, H/2]`` each."""
        positions = torch.arange(num_positions, device=self._device)[None]
        cos, sin = self._rotary(self._embedding[:1], positions)  # [1, C, H]; the first argument gives the type
        half = self._head_dim // 2
        return cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous()


class StaticForward(StaticTrunk):
    """The `Forward` of a model that has no `obstacle`.

    Attributes:
        taps: Outputs of the tapped layers; those of a call are overwritten by the next.
    """

    def __init__(self, model: Any, head: Head, layer_ids: Sequence[int]) -> None:
        super().__init__(model, head)
        self._place_of = {layer: place for place, layer in enumerate(layer_ids)}
        self.taps: list[Tensor] = [torch.empty(0)] * len(layer_ids)
        self._base = self._length = self._capacity = 0
        self._replayed: dict[tuple[int, bool], GraphRunner] = {}
        with torch.inference_mode(False):
            self._ids = torch.zeros(PROMPT_WIDTHS[-1], dtype=torch.int64, device=self._device)
            self._start = torch.zeros((), dtype=torch.int64, device=self._device)
            self._last = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._offsets = torch.arange(PROMPT_WIDTHS[-1], device=self._device)
        self._out: dict[tuple[int, bool], tuple[Tensor, list[Tensor]]] = {}
        self.reserve(BUCKET, 0)

    @torch.inference_mode()  # as everything that is compiled here: it is compiled anew for every mode
    def reserve(self, num_positions: int, num_tokens: int) -> None:
        """Make room for a sequence, which is forgotten if that was too small, and record graphs for calls of up to
        `num_tokens`: else the first ones record them."""
        capacity = bucket_of(num_positions + WIDTHS[-1])  # rows that fill a call up need room as well
        if capacity > self._capacity:
            self._make_room(capacity)
        self.clear()
        self._start.zero_()
        if num_tokens:
            for width in WIDTHS[: WIDTHS.index(width_of(num_tokens) or WIDTHS[-1]) + 1]:
                self._record(width, False)
            for width in PROMPT_WIDTHS:
                self._record(width, True)

    def clear(self) -> None:
        """Start a new sequence."""
        self._base = self._length = 0

    @torch.inference_mode()
    def append(self, tokens: Tokens, last_only: bool = False) -> Tensor:
        """Run tokens behind the sequence; logits ``[n, V]`` after each of them, or ``[1, V]`` after the last.

        What a call fills up behind the sequence no token sees, and the next call writes over it. The logits of a call
        are overwritten by the next.
        """
        num_tokens, start = len(tokens), self._length
        is_prompt = last_only and start == 0
        width = width_of(num_tokens, PROMPT_WIDTHS if is_prompt else WIDTHS)
        end = start + (width or num_tokens)
        if end > self._capacity:
            self._grow(end)
        self._base, self._length = start, start + num_tokens
        if width is None:
            ids = torch.as_tensor(tokens, device=self._device)
            positions = torch.arange(start, start + num_tokens, device=self._device)
            x, self.taps = self._run(ids, positions, start, end)
            return self._logits(x[-1:] if last_only else x)
        self._write_ids(tokens)
        self._start.fill_(start)  # recording writes there as well
        self._last.fill_(num_tokens - 1)
        self._record(width, is_prompt)
        self._replayed[width, is_prompt](bucket_of(end))
        logits, taps = self._out[width, is_prompt]
        self.taps = [tap[:num_tokens] for tap in taps]
        if is_prompt:
            return logits
        return logits[num_tokens - 1 if last_only else 0 : num_tokens]

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens last appended; at least one stays."""
        self._length = self._base + num_tokens

    def _write_ids(self, tokens: Tokens) -> None:
        if isinstance(tokens, Tensor):
            self._ids[: len(tokens)].copy_(tokens)
        elif len(tokens) == 1:
            self._ids[:1].fill_(tokens[0])  # a copy from the host would wait for the device
        else:
            self._ids[: len(tokens)].copy_(torch.tensor(tokens))

    def _launch(self, width: int, is_prompt: bool, bucket: int) -> None:
        """A call of `width` rows, from fixed places to fixed places; of a prompt, with the last token's logits."""
        positions = self._start + self._offsets[:width]
        x, taps = self._run(self._ids[:width], positions, None, bucket)
        if is_prompt:
            x = x.index_select(0, self._last)
        logits, places = self._out[width, is_prompt]
        logits.copy_(self._logits(x))
        for place, tap in zip(places, taps, strict=True):
            place.copy_(tap)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        start: int | None,
        end: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states ``[R, D]`` before the final norm, and the tapped layers' outputs.

        Args:
            start: Position of the first row if the host knows it; 0 starts a sequence, whose rows see one another only.
            end: Positions read.
        """
        x = F.embedding(ids, self._embedding)
        angles = self._cos[positions], self._sin[positions]
        visible = None if start == 0 else torch.arange(end, device=self._device)[None] <= positions[:, None]
        taps: list[Tensor] = [torch.empty(0)] * len(self._place_of)
        for i, layer in enumerate(self._layers):
            query, key, value = self._call(layer.project, x, angles)
            self._keys[i].index_copy_(0, positions, key)
            self._values[i].index_copy_(0, positions, value)
            if visible is None:
                attended = _causal(query, key, value, self._scale)
            else:
                attended = attend_static(query, self._keys[i, :end], self._values[i, :end], visible, self._scale)
            x = self._call(layer.complete, x, attended)
            if i in self._place_of:
                taps[self._place_of[i]] = x
        return x, taps

    def _record(self, width: int, is_prompt: bool) -> None:
        """Record a graph of every length; rows from `_start` on are written, which hold nothing that counts."""
        if (width, is_prompt) in self._replayed:
            return
        hidden, vocab = self._embedding.shape[1], self._head.weight.shape[0]
        with torch.inference_mode(False):
            self._out[width, is_prompt] = (
                torch.zeros(1 if is_prompt else width, vocab, device=self._device),
                [torch.zeros(width, hidden, dtype=self._dtype, device=self._device) for _ in self._place_of],
            )
        mode = "on" if self._is_on_gpu else "off"
        runner = GraphRunner(
            lambda bucket: self._launch(width, is_prompt, bucket), f"the target's call of {width} rows", mode
        )
        self._replayed[width, is_prompt] = runner
        bucket = BUCKET
        while self._is_on_gpu and bucket <= (bucket_of(width) if is_prompt else self._capacity):
            for _ in range(RECORDING_CALLS):
                runner(bucket)
            bucket *= 2

    def _grow(self, num_positions: int) -> None:
        """Make more room, and keep the sequence."""
        keys, values, length = self._keys, self._values, self._length
        self._make_room(bucket_of(num_positions))
        self._keys[:, :length], self._values[:, :length] = keys[:, :length], values[:, :length]

    def _make_room(self, capacity: int) -> None:
        self._capacity = capacity
        self._replayed.clear()  # addresses change
        size = (2, len(self._layers), capacity, self._num_kv_heads, self._head_dim)
        with torch.inference_mode(False):  # room made in that mode could not be written outside it
            self._keys, self._values = torch.zeros(size, dtype=self._dtype, device=self._device)
            self._cos, self._sin = self._angles(capacity)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of a sequence's first rows to one another: ``[R, N, H]``."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def obstacle(model: Any, head: Head) -> str | None:
    """Why this forward cannot stand in for a model, in one line, as far as its structure tells; None: it can."""
    dtype = head.weight.dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"weights of type {dtype}"
    return structure_obstacle(model, dtype)
