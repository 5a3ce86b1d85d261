"""What `adamw` does on CUDA, one launch a call and tensor. Imports Triton, and so is imported by CUDA code only."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]  # a part of torch on CUDA, absent beside torch for CPUs
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from paceline.kernels.adamw import SPAN_ELEMENTS

BLOCK = 1024
"""Elements of one program: four for each thread of its 8 warps, so that float32 and bfloat16 tensors are spread alike
over the threads. With eight, values would change threads through shared memory."""

SPAN = SPAN_ELEMENTS // BLOCK
"""Blocks whose squares one program sums up."""


def sums_of_squares(grads: list[Tensor]) -> Tensor:
    """Sums of squares of spans of contiguous tensors on one device, one after another: float32 ``[spans]``."""
    counts = [triton.cdiv(grad.numel(), SPAN * BLOCK) for grad in grads]
    sums = torch.empty(sum(counts), dtype=torch.float32, device=grads[0].device)
    start = 0
    with torch.cuda.device_of(sums):
        for grad, count in zip(grads, counts, strict=True):
            if count:
                _squares_kernel[(count,)](
                    grad, sums[start:], grad.numel(), SPAN=SPAN, BLOCK=BLOCK, num_warps=8
                )  # fmt: skip
            start += count
    return sums


@triton.jit
def _squares_kernel(grad, sums, num, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * (SPAN * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(SPAN):
        g = tl.load(grad + at, mask=at < num, other=0.0).to(tl.float32)
        total += g * g
        at += BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def update_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None,
    hyper: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """`adamw.adamw_` for contiguous tensors."""
    num = master.numel()
    if num == 0:
        return
    beta1, beta2 = betas
    with torch.cuda.device_of(master):  # Triton launches on the thread's device, whichever that is
        _update_kernel[(triton.cdiv(num, BLOCK),)](
            master, exp_avg, exp_avg_sq, grad, copy, hyper, num,
            1 - beta1, beta2, 1 - beta2, eps, weight_decay,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _update_kernel(
    master, exp_avg, exp_avg_sq, grad, copy, hyper, num,
    one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lr, grad_scale = tl.load(hyper), tl.load(hyper + 3)
    correction1, correction2 = tl.load(hyper + 1), tl.load(hyper + 2)
    if (grad_scale != 0.0) & (tl.abs(grad_scale) < float("inf")):  # false for NaN
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < num
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * grad_scale
        m = tl.load(exp_avg + at, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
        p = tl.load(master + at, mask=inside, other=0.0)
        m += (g - m) * one_minus_beta1
        v = v * beta2 + one_minus_beta2 * g * g
        denominator = tl.sqrt(v) / tl.sqrt(correction2) + eps
        p = p * (1.0 - lr * weight_decay) - lr / correction1 * (m / denominator)
        tl.store(exp_avg + at, m, mask=inside)
        tl.store(exp_avg_sq + at, v, mask=inside)
        tl.store(master + at, p, mask=inside)
        if copy is not None:
            tl.store(copy + at, p.to(copy.dtype.element_ty), mask=inside)
