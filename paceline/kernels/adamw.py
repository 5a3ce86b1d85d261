"""One AdamW update of a tensor with everything that belongs to it in a single pass, and the norm that clips gradients.

The weights that learn are float32 masters; the copy that the model computes with, often bfloat16, is written along the
way. Rate, bias corrections and the factor of the gradient are read from the device, so that no update waits for the
host and a CUDA graph can hold it: 1.05 B parameters take 7.6 ms on an H200.
On CUDA this is the kernel of `adamw_triton`; what stands here is the same in plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

SPAN_ELEMENTS = 32_768
"""Elements whose squares are summed first, on CUDA. Tensors that begin at multiples of it in a flat buffer have the
buffer's norm to the bit."""


@torch.no_grad()
def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None,
    hyper: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update a tensor, its moments and its copy in place; the arithmetic of `torch.optim.AdamW`, in its order.

    With g = grad * grad_scale: m += (g - m) (1 - beta1), v = beta2 v + (1 - beta2) g^2, and
    p = p (1 - lr * weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps).
    Source: Loshchilov and Hutter, arXiv:1711.05101, Algorithm 2, without its schedule.

    Args:
        master, exp_avg, exp_avg_sq: float32, contiguous, of one shape, as are `grad` and `copy`.
        grad: Of any floating type.
        copy: Receives the updated master in its own type; None: there is none.
        hyper: float32 ``[4]``: lr, 1 - beta1^t, 1 - beta2^t, grad_scale. A `grad_scale` of 0, inf or NaN leaves
            everything as it is, whatever the gradient holds.
    """
    for tensor in (exp_avg, exp_avg_sq, grad, *(() if copy is None else (copy,))):
        assert tensor.shape == master.shape and tensor.is_contiguous()
    assert master.is_contiguous() and master.dtype == exp_avg.dtype == exp_avg_sq.dtype == hyper.dtype == torch.float32
    if _has_kernels(master.device):
        from paceline.kernels.adamw_triton import update_  # Triton is there on CUDA hosts alone
    else:
        update_ = _update_
    update_(master, exp_avg, exp_avg_sq, grad, copy, hyper, betas, eps, weight_decay)


def squared_norm(grads: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all elements, float64 scalar on their device; 0 on the host if there are none.

    The same bits for the same gradients: sums of chunks, then of tensors, in float32 and without atomics. A few
    launches for all tensors of one type. Not finite if any gradient is not.
    """
    grads = [grad.detach() for grad in grads]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    if _has_kernels(grads[0].device):
        from paceline.kernels.adamw_triton import sums_of_squares  # Triton is there on CUDA hosts alone

        return sums_of_squares(grads).double().sum()
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)  # tensors of mixed types would be handled singly
    norms = [norm for same in by_dtype.values() for norm in torch._foreach_norm(same, 2, dtype=torch.float32)]
    return torch.stack(norms).double().square().sum()


def _has_kernels(device: torch.device) -> bool:
    """Whether the update is done by a Triton kernel."""
    return device.type == "cuda"


def _update_(
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
    lr, correction1, correction2, grad_scale = hyper.tolist()
    if grad_scale == 0.0 or not math.isfinite(grad_scale):
        return
    beta1, beta2 = betas
    grad = grad.float() * grad_scale
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    master.mul_(1 - lr * weight_decay)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(correction2)).add_(eps)
    master.addcdiv_(exp_avg, denominator, value=-lr / correction1)
    if copy is not None:
        copy.copy_(master)
