"""What `attend_slots` does on CUDA: a program reads the keys and values of one slot and head, as far as the slot goes.

The query heads that share them are the rows of one product, so each key is read once. One program walks through all
positions of its slot: meant for many slots. A few with long contexts would leave most of a GPU idle.
Imports Triton, and so is imported by CUDA code only.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]  # a part of torch on CUDA, absent beside torch for CPUs
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

TILE_BYTES = 8192
"""Keys that are read together, padding counted; as many values follow. The next tiles are on their way meanwhile."""

NUM_STAGES = 3
"""Tiles of keys that are under way or in use."""

MIN_ROWS = 16
"""Least rows, columns and depth of a product on the tensor cores."""


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """`static_attention.attend_slots`."""
    num_slots, num_heads, head_dim = query.shape
    capacity, num_kv = key.shape[1:3]
    assert query.stride(2) == key.stride(3) == value.stride(3) == lengths.stride(0) == 1
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    width = max(MIN_ROWS, triton.next_power_of_2(head_dim))
    tile = max(MIN_ROWS, TILE_BYTES // (width * key.element_size()))
    with torch.cuda.device_of(query):  # Triton launches on the thread's device, whichever that is
        _slots_kernel[(num_slots * num_kv,)](
            query, key, value, lengths, out, scale * LOG2E, capacity,
            *query.stride()[:2], *key.stride()[:3], *value.stride()[:3],
            M=num_kv, SHARED=num_heads // num_kv, H=head_dim, WIDTH=width, TILE=tile,
            ROWS=max(MIN_ROWS, triton.next_power_of_2(num_heads // num_kv)),
            num_warps=4, num_stages=NUM_STAGES,
        )  # fmt: skip
    return out


LOG2E = 1.4426950408889634
"""Powers of two are what a GPU computes: exp(x) = 2^(x log2 e)."""


@triton.jit
def _slots_kernel(
    query, key, value, lengths, out, scale, capacity,
    query_slot, query_head, key_slot, key_position, key_head, value_slot, value_position, value_head,
    M: tl.constexpr, SHARED: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attention of the query heads of one slot that share a head of keys.

    Args:
        query_slot..value_head: Strides in elements.
        SHARED, ROWS: Query heads, and rows of the product that they are a part of.
        H, WIDTH: Head size, and the columns of the product.
        TILE: Positions read together.
    """
    slot = (tl.program_id(0) // M).to(tl.int64)
    head = tl.program_id(0) % M
    length = tl.minimum(tl.load(lengths + slot), capacity).to(tl.int32)
    rows, columns, positions = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    is_row, is_column = rows[:, None] < SHARED, columns[None] < H
    at = (head * SHARED + rows[:, None]) * query_head + columns[None]
    q = tl.load(query + slot * query_slot + at, mask=is_row & is_column, other=0.0)
    key += slot * key_slot + head * key_head
    value += slot * value_slot + head * value_head
    key_tile = positions[:, None] * key_position + columns[None]
    value_tile = positions[:, None] * value_position + columns[None]
    best = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    attended = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, length, TILE):
        seen = start + positions < length
        inside = seen[:, None] & is_column
        k = tl.load(key + tl.cast(start, tl.int64) * key_position + key_tile, mask=inside, other=0.0)
        v = tl.load(value + tl.cast(start, tl.int64) * value_position + value_tile, mask=inside, other=0.0)
        scores = scale * tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(seen[None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        kept = tl.exp2(best - higher)
        total = total * kept + tl.sum(weights, axis=1)
        attended = tl.dot(weights.to(v.dtype), v, attended * kept[:, None], input_precision="ieee")
        best = higher
    at = (slot * M + head) * SHARED * H + rows[:, None] * H + columns[None]
    tl.store(out + at, (attended / total[:, None]).to(q.dtype), mask=is_row & is_column)
