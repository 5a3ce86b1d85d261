"""What `linear_mixed_loss` does to the logits of a chunk on CUDA: a program owns a row and walks over it two or three
times, the last time with the gradient in its wake.

The first walk makes the normalisers of both distributions, and their divergence; a second, if L1 is asked for, the sums
that its gradient needs. No float32 logits are ever stored. Imports Triton, and so is imported by CUDA code only.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]  # a part of torch on CUDA, absent beside torch for CPUs
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from paceline.kernels.linear_cross_entropy_triton import _logit

BLOCK = 4096
"""Logits of a row that are looked at together, by up to 16 warps: 8 a thread, each with normalisers of its own."""


def rows_of_chunk(
    products: Tensor,
    target: Tensor,
    added: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    factors: tuple[float, float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """`linear_mixed_loss._rows_of_chunk` without D-PACE: `products` and `added` become their gradients.

    Args:
        factors: Of cross-entropy, KL and L1.
    """
    num, vocab = products.shape
    losses = torch.empty(num, dtype=torch.float32, device=products.device)
    overlap = torch.empty_like(losses)
    hits = torch.empty(num, dtype=torch.bool, device=products.device)
    ce, kl, l1 = factors
    tile = min(BLOCK, triton.next_power_of_2(vocab))
    with torch.cuda.device_of(products):  # Triton launches on the thread's device, whichever that is
        _mixed_kernel[(num,)](
            products, target, added, labels, weights, losses, overlap, hits.view(torch.uint8),
            V=vocab, SCALE=scale, SOFTCAP=softcap, CE=ce, KL=kl, L1=l1, BLOCK=tile,
            num_warps=max(1, min(16, tile // 256)), maxnreg=64,
        )  # fmt: skip  # 64 registers a thread: two rows share a multiprocessor
    return losses.sum(), weights.sum(), hits, overlap, products, added


LOG2E = tl.constexpr(1.4426950408889634)
"""Powers of two are what a GPU computes: exp(x) = 2^(x log2 e)."""

LOWEST = tl.constexpr(-3e38)
"""Best logit of none: finite, so that the difference to -inf is a number."""


@triton.jit
def _logits_at(
    products, target, added, columns, inside, SCALE: tl.constexpr, SOFTCAP: tl.constexpr
):  # fmt: skip
    """The head's logits of the drafter, the same with the bias, and the target's, float32; 0 outside."""
    own = _logit(tl.load(products + columns, mask=inside, other=0.0), SCALE, SOFTCAP)
    biased = own
    if added is not None:
        biased += tl.load(added + columns, mask=inside, other=0.0).to(tl.float32)
    return own, biased, _logit(tl.load(target + columns, mask=inside, other=0.0), SCALE, SOFTCAP)


@triton.jit
def _mixed_kernel(
    products, target, added, labels, weights, losses, overlap, hits,
    V: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    CE: tl.constexpr, KL: tl.constexpr, L1: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, overlap, hit and gradients of one row, ``CE * nll + KL * KL(target || drafter) + L1 * distance``.

    Args:
        products, target, added: ``[n, V]``, bare products of drafter and target, and the bias, or None. The first and
            the last become gradients.
        losses: float32 ``[n]``, times the weight.
        hits: uint8 ``[n]``.
    """
    row = tl.program_id(0).to(tl.int64)
    products += row * V
    target += row * V
    if added is not None:
        added += row * V
    label, weight = tl.load(labels + row), tl.load(weights + row)
    # Read before any warp writes the gradient: the sums over all warps stand in between.
    at_label = _logits_at(products, target, added, label, (label >= 0) & (label < V), SCALE, SOFTCAP)[1]
    columns = tl.arange(0, BLOCK)

    best_p = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    best_t = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    total_p, total_t = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    apart = tl.zeros((BLOCK,), dtype=tl.float32)  # sum of exp(target - best) * (target - drafter)
    for first in range(0, V, BLOCK):
        inside = first + columns < V
        _, x, y = _logits_at(products, target, added, first + columns, inside, SCALE, SOFTCAP)
        further = y - x
        x, y = tl.where(inside, x, float("-inf")), tl.where(inside, y, float("-inf"))
        # One power serves both cases: what is new counts less than the best, or all before it does.
        above = x - best_p
        power = tl.exp(-tl.abs(above))
        total_p = tl.where(above > 0.0, total_p * power + 1.0, total_p + power)
        best_p = tl.maximum(best_p, x)
        above = y - best_t
        power = tl.exp(-tl.abs(above))
        total_t = tl.where(above > 0.0, total_t * power + 1.0, total_t + power)
        if KL != 0.0:
            apart = tl.where(above > 0.0, apart * power + further, apart + power * further)
        best_t = tl.maximum(best_t, y)
    best = tl.max(best_p, axis=0)
    lse_p = best + tl.log(tl.sum(total_p * tl.exp(best_p - best), axis=0))
    top = tl.max(best_t, axis=0)
    share = tl.exp(best_t - top)
    total = tl.sum(total_t * share, axis=0)
    lse_t = top + tl.log(total)
    loss = CE * (lse_p - at_label)
    if KL != 0.0:
        loss += KL * (tl.sum(apart * share, axis=0) / total - lse_t + lse_p)
    lse_p *= LOG2E
    lse_t *= LOG2E

    lean = 0.0  # sum of sign(p - t) * p
    distances = tl.zeros((BLOCK,), dtype=tl.float32)
    if L1 != 0.0:
        leans = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, V, BLOCK):
            inside = first + columns < V
            _, x, y = _logits_at(products, target, added, first + columns, inside, SCALE, SOFTCAP)
            x, y = x * LOG2E - lse_p, y * LOG2E - lse_t
            p, t = tl.exp2(x), tl.exp2(y)
            distances += tl.where(inside, tl.abs(p - t), 0.0)
            leans += tl.where(inside, tl.where(x > y, p, tl.where(x < y, -p, 0.0)), 0.0)
        lean = tl.sum(leans, axis=0)

    even = weight * (CE + KL - L1 * lean)  # what p is multiplied with where it is t, above it, and below it
    above, below = even + weight * L1, even - weight * L1
    label = label.to(tl.int32)
    for first in range(0, V, BLOCK):
        inside = first + columns < V
        own, x, y = _logits_at(products, target, added, first + columns, inside, SCALE, SOFTCAP)
        x, y = x * LOG2E - lse_p, y * LOG2E - lse_t
        p = tl.exp2(x)
        gradient = even * p
        if L1 != 0.0:
            gradient = tl.where(x > y, above, tl.where(x < y, below, even)) * p
        if KL != 0.0:
            gradient -= weight * KL * tl.exp2(y)
        if L1 == 0.0:
            distances += tl.where(inside, tl.abs(p - tl.exp2(y)), 0.0)
        gradient -= tl.where(first + columns == label, weight * CE, 0.0)
        if added is not None:
            tl.store(added + first + columns, gradient.to(added.dtype.element_ty), mask=inside)
        if SOFTCAP is not None:
            gradient *= 1.0 - (own / SOFTCAP) * (own / SOFTCAP)
        if SCALE != 1.0:
            gradient *= SCALE
        tl.store(products + first + columns, gradient.to(products.dtype.element_ty), mask=inside)
    distance = tl.sum(distances, axis=0)
    loss += L1 * distance
    tl.store(losses + row, weight * loss)
    tl.store(overlap + row, 1.0 - 0.5 * distance)
    tl.store(hits + row, (at_label >= best).to(tl.uint8))
