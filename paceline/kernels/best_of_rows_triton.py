"""What `best_of_rows` does on CUDA: a program reads a row once and never writes it, whatever the number asked for.

Imports Triton, and so is imported by CUDA code only. Shape letters: R rows, V vocabulary, C values asked for.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]  # a part of torch on CUDA, absent beside torch for CPUs
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK = 4096
"""Values of a row that are read together, by `NUM_WARPS` warps: 32 a thread."""

NUM_WARPS = 4

WIDTH = 4
"""Neighbours in a block that belong to one group, with those at their place in all other blocks: 1,024 groups, and of
16 of them 768 members at a vocabulary of 49,152. Fewer groups have more members."""


def best_of_rows(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy.best_of_rows`: values in the type of the logits ``[..., V]``, and ids. No gradient.

    V is at least ``8 * num``, so that there are enough groups, and `num` of them have no more than 65,536 members, all
    counts rounded up to powers of two. NaN is larger than all else, as it is for `topk`.
    """
    vocab = logits.shape[-1]
    tile = min(BLOCK, triton.next_power_of_2(vocab + 1) // 2)  # not above V, so that no group is empty
    slots, span = (triton.next_power_of_2(n) for n in (max(2, num), triton.cdiv(vocab, tile) * WIDTH))
    assert num * WIDTH <= tile and slots * span <= 1 << 16
    rows = logits.contiguous()
    values = torch.empty(*logits.shape[:-1], num, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(values.shape, dtype=torch.int64, device=logits.device)
    if values.numel():
        with torch.cuda.device_of(logits):  # Triton launches on the thread's device, whichever that is
            _best_kernel[(values.numel() // num,)](
                rows, values, ids, V=vocab, NUM=num, BLOCK=tile, WIDTH=WIDTH, SLOTS=slots, SPAN=span,
                NARROW=logits.dtype == torch.bfloat16, num_warps=NUM_WARPS,
            )  # fmt: skip
    return values, ids


@triton.jit
def _keys(x, index, NARROW: tl.constexpr):
    """Integers in the order of float32 values, NaN the largest; of equal values the one of the lower index is larger.

    Value above, index below: 16 bits each where the values come from bfloat16, which 32-bit maxima are enough for.
    """
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    if NARROW:
        return (order & -0x10000) | (0xFFFF - index)
    else:
        return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _largest(keys, NUM: tl.constexpr, SLOTS: tl.constexpr, NARROW: tl.constexpr):
    """int32 ``[SLOTS]`` indices of the `NUM` largest keys, descending; 0 behind them."""
    INDEX: tl.constexpr = 0xFFFF if NARROW else 0x7FFFFFFF
    REMOVED: tl.constexpr = -(2**31) if NARROW else -(2**63)  # below every key, also that of -inf
    slots = tl.arange(0, SLOTS)
    found = tl.zeros((SLOTS,), dtype=tl.int32)
    for slot in range(NUM):
        best = tl.max(keys, axis=0)
        found = tl.where(slots == slot, (INDEX - (best & INDEX)).to(tl.int32), found)
        keys = tl.where(keys == best, REMOVED, keys)
    return found


@triton.jit
def _best_kernel(
    logits, values, ids,
    V: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    SPAN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The `NUM` largest of one row: they are in the groups with the `NUM` largest best ones.

    Args:
        logits: ``[R, V]``.
        values, ids: ``[R, NUM]``.
        BLOCK: Values read together; a group's are at the same `WIDTH` places of every block.
        SLOTS, SPAN: Powers of two that hold `NUM`, and the members of a group.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    columns = tl.arange(0, BLOCK)
    best = tl.load(logits + columns).to(tl.float32)  # [BLOCK], the best at each place of a block
    for first in range(BLOCK, V, BLOCK):
        x = tl.load(logits + first + columns, mask=first + columns < V, other=float("-inf"))
        best = tl.maximum(best, x.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    keys = tl.reshape(_keys(best, columns // WIDTH, NARROW), (BLOCK // WIDTH, WIDTH))
    groups = _largest(tl.max(keys, axis=1), NUM, SLOTS, NARROW)
    slots, members = tl.arange(0, SLOTS), tl.arange(0, SPAN)
    offsets = members // WIDTH * BLOCK + members % WIDTH
    tokens = groups[:, None] * WIDTH + offsets[None]
    inside = (slots[:, None] < NUM) & (tokens < V)
    x = tl.load(logits + tokens, mask=inside, other=0.0).to(tl.float32)
    keys = _keys(x, slots[:, None] * SPAN + members[None], NARROW)
    keys = tl.where(inside, keys, -(2**31) if NARROW else -(2**63))
    places = _largest(tl.reshape(keys, (SLOTS * SPAN,)), NUM, SLOTS, NARROW)
    member = places % SPAN
    token = tl.gather(groups, places // SPAN, 0) * WIDTH + member // WIDTH * BLOCK + member % WIDTH
    used = slots < NUM
    tl.store(ids + row * NUM + slots, token.to(tl.int64), mask=used)
    tl.store(values + row * NUM + slots, tl.load(logits + token, mask=used, other=0.0), mask=used)
