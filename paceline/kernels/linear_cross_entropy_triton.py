"""The rows of `linear_cross_entropy` on CUDA: two matmuls a chunk and between them kernels that visit each row once.

A program owns one row of a chunk's logits, reads it once for the loss and once more to write the gradient in its place.
Which rows count is known on the device alone, so every chunk is whole: rows past the last that counts fill it up and
leave no trace. Imports Triton, and so is imported by CUDA code only.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]  # a part of torch on CUDA, absent beside torch for CPUs
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from paceline.kernels.linear_cross_entropy import Candidates, DPace, Head, best_of_rows, chunk_rows

BLOCK = 8192
"""Logits of a row that are looked at together, by 16 warps; a prototype with 32 took 1.5 times as long."""


def forward(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    weights: Tensor,
    rows: Tensor | None,
    num_rows: int,
    dpace: DPace | None,
    best: Candidates,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, sum of weights, hits, and the gradient of the hidden rows; arguments as `weighted_linear_cross_entropy`.

    Candidates are filled in, also of rows in the last chunk that do not count.
    """
    num, width, vocab = len(hidden), hidden.shape[1], head.weight.shape[0]
    per_chunk = max(1, min(chunk_rows(dpace), num))
    gradient = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    hits = torch.zeros(num, dtype=torch.bool, device=hidden.device)
    flags = hits.view(torch.uint8)
    losses = torch.zeros(num, dtype=torch.float32, device=hidden.device)
    used = torch.zeros_like(losses)
    logits = torch.empty(per_chunk, vocab, dtype=hidden.dtype, device=hidden.device)
    if rows is not None:
        x_buffer = torch.empty(per_chunk, width, dtype=hidden.dtype, device=hidden.device)
        gradient_buffer = torch.empty_like(x_buffer)
    if dpace is not None:
        statistics = torch.empty(4, per_chunk, dtype=torch.float32, device=hidden.device)
    num_candidates = best.ids.shape[1]
    tile = min(BLOCK, triton.next_power_of_2(vocab))
    num_warps = max(1, min(16, tile // 512))
    options = {
        "V": vocab, "SCALE": head.scale, "SOFTCAP": head.softcap, "BLOCK": tile, "num_warps": num_warps, "maxnreg": 40,
    }  # fmt: skip  # 40 registers a thread: three rows share a multiprocessor, and nothing spills
    with torch.cuda.device_of(hidden):  # Triton launches on the thread's device, whichever that is
        for start in range(0, num_rows, per_chunk):
            size = min(per_chunk, num - start)
            if rows is None:
                index, x, x_gradient = None, hidden[start : start + size], gradient[start : start + size]
            else:
                index, x, x_gradient = rows[start : start + size], x_buffer[:size], gradient_buffer[:size]
                torch.index_select(hidden, 0, index, out=x)
            torch.mm(x, head.weight.T, out=logits[:size])
            if num_candidates:
                top, ids = best_of_rows(logits[:size], num_candidates)
                place = torch.arange(start, start + size, device=hidden.device) if index is None else index
                best.logits.index_copy_(0, place, head.transformed(top.float()))
                best.ids.index_copy_(0, place, ids)
            which = (rows, start, num_rows - start)
            if dpace is None:
                _fused_kernel[(size,)](logits, labels, weights, *which, flags, losses, used, **options)
            else:
                _statistics_kernel[(size,)](logits, labels, weights, *which, flags, statistics, per_chunk, **options)
                _dpace_gradient_kernel[(size,)](
                    logits, labels, *which, losses, used, statistics, per_chunk,
                    J=dpace.block, FLOOR=dpace.floor, **options,
                )  # fmt: skip
            torch.mm(logits[:size], head.weight, out=x_gradient)
            if index is not None:
                gradient.index_copy_(0, index, x_gradient)
    return losses.sum(), used.sum(), hits, gradient


@triton.jit
def _logit(x, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """A stored logit as the loss sees it, float32: scaled, then capped."""
    x = x.to(tl.float32)
    if SCALE != 1.0:
        x *= SCALE
    if SOFTCAP is not None:
        x = SOFTCAP * (1.0 - 2.0 / (tl.exp(x * (2.0 / SOFTCAP)) + 1.0))  # softcap * tanh(x / softcap)
    return x


@triton.jit
def _row_of(rows, start):
    """Row of `hidden` that the program works for."""
    row = (start + tl.program_id(0)).to(tl.int64)
    if rows is not None:
        row = tl.load(rows + row)
    return row


@triton.jit
def _weight_of(weights, row, limit):
    """Weight of a row, 0 past the last that counts."""
    return tl.where(tl.program_id(0) < limit, tl.load(weights + row), 0.0)


@triton.jit
def _read_row(logits, label, V: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """The label's logit, the best one, and the sum of exp(logit - best), in one pass over a row.

    The label's is read first: the passes' reductions then stand between it and any warp that writes the gradient.
    """
    known = (label >= 0) & (label < V)  # rows that do not count may have any label
    at_label = tl.load(logits + label, mask=known, other=0.0)
    at_label = tl.where(known, _logit(at_label, SCALE, SOFTCAP), float("-inf"))
    columns = tl.arange(0, BLOCK)
    best, total = float("-inf"), 0.0
    for first in range(0, V, BLOCK):
        inside = first + columns < V
        x = tl.load(logits + first + columns, mask=inside, other=0.0)
        x = tl.where(inside, _logit(x, SCALE, SOFTCAP), float("-inf"))
        higher = tl.maximum(best, tl.max(x, axis=0))
        total = total * tl.exp(best - higher) + tl.sum(tl.exp(x - higher), axis=0)
        best = higher
    return at_label, best, total


@triton.jit
def _write_gradient(
    logits, label, weight, best, total,
    V: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d loss / d stored logits = weight * (softmax - onehot) * scale * (1 - (logit / softcap)^2), in place."""
    columns = tl.arange(0, BLOCK)
    factor = 1.0 / total
    for first in range(0, V, BLOCK):
        inside = first + columns < V
        stored = tl.load(logits + first + columns, mask=inside, other=0.0)
        x = _logit(stored, SCALE, SOFTCAP)
        gradient = weight * (tl.exp(x - best) * factor - tl.where(first + columns == label, 1.0, 0.0))
        if SOFTCAP is not None:
            gradient *= 1.0 - (x / SOFTCAP) * (x / SOFTCAP)
        if SCALE != 1.0:
            gradient *= SCALE
        gradient = tl.where(weight == 0.0, 0.0, gradient)  # whatever the logits are: NaN times 0 is NaN
        tl.store(logits + first + columns, gradient.to(stored.dtype), mask=inside)


@triton.jit(do_not_specialize=["start", "limit"])
def _fused_kernel(
    logits, labels, weights, rows, start, limit, hits, losses, used,
    V: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, hit and gradient of one row whose weight is known beforehand.

    Args:
        logits: ``[rows of the chunk, V]``; becomes the gradient.
        rows: The permutation, or None; `start` is the chunk's place in it.
        limit: Rows of the chunk, the first ones, that count.
        hits: uint8, by row of `hidden`, as `losses` and `used` weights.
    """
    row = _row_of(rows, start)
    label, weight = tl.load(labels + row), _weight_of(weights, row, limit)
    logits += tl.program_id(0).to(tl.int64) * V
    at_label, best, total = _read_row(logits, label, V, SCALE, SOFTCAP, BLOCK)
    loss = weight * (tl.log(total) + best - at_label)
    tl.store(losses + row, tl.where(weight == 0.0, 0.0, loss))
    tl.store(used + row, weight)
    tl.store(hits + row, ((at_label >= best) & (tl.program_id(0) < limit)).to(tl.uint8))
    _write_gradient(logits, label, weight, best, total, V, SCALE, SOFTCAP, BLOCK)


@triton.jit(do_not_specialize=["start", "limit"])
def _statistics_kernel(
    logits, labels, weights, rows, start, limit, hits, statistics, per_chunk,
    V: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What D-PACE has to know of all rows of a block before it can weigh one.

    Args:
        statistics: ``[4, per_chunk]``, by row of the chunk: weight, nll, best logit, sum of exp(logit - best).
    """
    row = _row_of(rows, start)
    label, weight = tl.load(labels + row), _weight_of(weights, row, limit)
    place = tl.program_id(0)
    logits += place.to(tl.int64) * V
    at_label, best, total = _read_row(logits, label, V, SCALE, SOFTCAP, BLOCK)
    tl.store(hits + row, ((at_label >= best) & (place < limit)).to(tl.uint8))
    tl.store(statistics + place, weight)
    tl.store(statistics + per_chunk + place, tl.log(total) + best - at_label)
    tl.store(statistics + 2 * per_chunk + place, best)
    tl.store(statistics + 3 * per_chunk + place, total)


@triton.jit(do_not_specialize=["start", "limit"])
def _dpace_gradient_kernel(
    logits, labels, rows, start, limit, losses, used, statistics, per_chunk,
    J: tl.constexpr, FLOOR: tl.constexpr,
    V: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and gradient of one row with the weight of `DPace.weights`, which it works out from its block's losses."""
    row = _row_of(rows, start)
    label = tl.load(labels + row)
    place = tl.program_id(0)
    slot = place % J
    reached, weight = 1.0, 0.0
    for other in tl.static_range(J):
        counts = tl.load(statistics + place - slot + other) != 0.0
        confidence = tl.exp(-tl.load(statistics + per_chunk + place - slot + other))
        reached = tl.where(counts, reached * ((1.0 - FLOOR) * confidence + FLOOR), reached)
        weight += tl.where(counts & (other >= slot), reached, 0.0)
    weight *= tl.load(statistics + place)
    nll = tl.load(statistics + per_chunk + place)
    best, total = tl.load(statistics + 2 * per_chunk + place), tl.load(statistics + 3 * per_chunk + place)
    tl.store(losses + row, tl.where(weight == 0.0, 0.0, weight * nll))
    tl.store(used + row, weight)
    logits += place.to(tl.int64) * V
    _write_gradient(logits, label, weight, best, total, V, SCALE, SOFTCAP, BLOCK)
