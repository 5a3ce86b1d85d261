"""Attention over reserved room: keys and values stand at fixed addresses, and a mask says which of them count.

What a decoding step needs to be replayed from a CUDA graph: neither shapes nor addresses change while the sequence
grows. Shape letters: R query rows, B slots, C positions of the room, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

BUCKET = 512
"""Positions that are read at least; then twice as many, and so on, as the sequence grows."""


def bucket_of(num_positions: int) -> int:
    """Positions that a step over a sequence of this length reads: `BUCKET` times a power of two."""
    bucket = BUCKET
    while bucket < num_positions:
        bucket *= 2
    return bucket


def attend_static(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax attention of a few rows over the room; every key is read once for all query heads that share it.

    Args:
        query: ``[R, N, H]``, rotated.
        key, value: ``[C, M, H]``; N is a multiple of M. What no row sees may hold anything finite.
        visible: bool ``[R, C]``, at least one key a row.
    Returns: ``[R, N, H]``.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv, shared = key.shape[1], query.shape[1] // key.shape[1]
    rows = query.view(num_rows, num_kv, shared, head_dim).permute(1, 2, 0, 3).reshape(num_kv, -1, head_dim)
    scores = _scores(rows, key.permute(1, 2, 0)).view(num_kv, shared, num_rows, -1)  # [M, N/M, R, C], float32
    weights = _softmax(query.device.type)(scores, visible, scale, value.dtype).view(num_kv, shared * num_rows, -1)
    out = torch.bmm(weights, value.transpose(0, 1))  # [M, N/M * R, H]
    return out.view(num_kv, shared, num_rows, head_dim).permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)


def attend_slots(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Softmax attention of one row of each of several sequences over the sequence's own room, as far as it goes.

    On CUDA this is the kernel of `static_attention_triton`, which reads what a row sees and nothing else.

    Args:
        query: ``[B, N, H]``, rotated; the last dimension is contiguous, as it is in the others.
        key, value: ``[B, C, M, H]``; N is a multiple of M. What a row does not see may hold anything finite.
        lengths: int64 ``[B]``, at least 1: the first positions, which the row sees; above C it sees all.
    Returns: ``[B, N, H]``.
    """
    if _has_kernels(query.device):
        from paceline.kernels.static_attention_triton import attend  # Triton is there on CUDA hosts alone

        return attend(query, key, value, lengths, scale)
    grouped = query.unflatten(1, (key.shape[2], -1))  # those that share a head of keys, as if they were its rows
    heads = grouped, key.transpose(1, 2), value.transpose(1, 2)
    visible = torch.arange(key.shape[1], device=key.device) < lengths[:, None]
    return F.scaled_dot_product_attention(*heads, attn_mask=visible[:, None, None], scale=scale).flatten(1, 2)


def _has_kernels(device: torch.device) -> bool:
    """Whether slots are attended to by a Triton kernel."""
    return device.type == "cuda"


def _scores(rows: Tensor, key: Tensor) -> Tensor:
    """float32 products; on a GPU they are not rounded to the inputs' type in between."""
    if rows.device.type == "cuda" and rows.dtype != torch.float32:
        return torch.bmm(rows, key, out_dtype=torch.float32)
    return torch.bmm(rows, key).float()


def _masked_softmax(scores: Tensor, visible: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (scores * scale).masked_fill(~visible, float("-inf")).softmax(-1).to(dtype)


@functools.cache
def _softmax(device: str):  # type: ignore[no-untyped-def]  # one of two functions of one signature
    """One kernel on a GPU, whatever the length."""
    return torch.compile(_masked_softmax, fullgraph=True, dynamic=True) if device == "cuda" else _masked_softmax
