"""One Muon update of a matrix: its momentum, made nearly orthogonal, as a step of the size that AdamW's would have.

Like `kernels.adamw` it reads rate and factor of the gradient from the device, so that no update waits for the host and
a CUDA graph can hold it. `torch.optim.Muon`, which the tests compare with, has no masters, and its rate is the host's.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
NORM_EPS = 1e-7
"""Of the iteration: as in `torch.optim.Muon`."""

RMS = 0.2
"""Root mean square of an update over the rate, which is AdamW's. Source: Moonlight, arXiv:2502.16982, section 2.2."""


@torch.no_grad()
def muon_(
    master: Tensor, momentum: Tensor, grad: Tensor, copy: Tensor | None, hyper: Tensor, weight_decay: float
) -> None:
    """Update a matrix, its momentum and its copy in place.

    With g = grad * grad_scale: m += (g - m) (1 - 0.95), u = g + (m - g) 0.95 (Nesterov's), and
    p = p (1 - lr * weight_decay) - lr * 0.2 sqrt(max(rows, columns)) * orthogonalised(u).
    Source: Jordan et al., Muon (2024); its rate as in arXiv:2502.16982.

    Args:
        master, momentum: float32 ``[rows, columns]``, as are `grad` and `copy` in their types.
        copy: Receives the updated master in its own type; None: there is none.
        hyper: As of `adamw_`, of which lr and grad_scale are read. A `grad_scale` of 0, inf or NaN leaves everything as
            it is.
    """
    lr, scale = hyper[0], hyper[3]
    is_good = scale.isfinite() & (scale != 0)
    scaled = torch.where(is_good, grad.float() * scale, 0.0)
    moved = momentum.lerp(scaled, 1.0 - MOMENTUM)
    update = orthogonalised(scaled.lerp(moved, MOMENTUM)).float()
    rate = lr * RMS * max(master.shape) ** 0.5
    momentum.copy_(torch.where(is_good, moved, momentum))
    master.copy_(torch.where(is_good, master * (1.0 - lr * weight_decay) - rate * update, master))
    if copy is not None:
        copy.copy_(master)


def orthogonalised(matrix: Tensor) -> Tensor:
    """bfloat16 ``[rows, columns]``: the matrix with its singular values brought near 1, by five Newton-Schulz steps."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=NORM_EPS)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
