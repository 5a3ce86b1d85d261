"""The update of `adamw` on CUDA, one launch a tensor. Imports Triton, and so is imported by CUDA code only."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]  # a part of torch on CUDA, absent beside torch for CPUs
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK = 1024
"""Elements of one program: four for each thread of its 8 warps, so that float32 and bfloat16 tensors are spread alike
over the threads. With eight, values would change threads through shared memory."""


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
