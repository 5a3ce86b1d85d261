"""DFlash2's convolution along a block: each slot takes in the slots right before it, by weights that depend on it.

Shape letters: A blocks, K block size, D hidden, W taps, Q channel groups.
Source: DFlash2, as released decoders and trainers have it (z-lab's `dflash` 0.1.0, vLLM 0.32).
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_conv(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """Sum over taps t of ``(base[t] + delta[i, t]) * x[i - t]`` for each slot i; what is before slot 0 is zero.

    The weights are those of the slot that is made, not of the one that is read. Taps are added in float32 (in float64
    for float64), and rounded once.

    Args:
        x: ``[A, K, D]``.
        base: ``[W, D]``.
        delta: ``[A, K, W, Q]``; channel c has that of group ``c // (D / Q)``.
    Returns: ``[A, K, D]`` in the type of `x`.
    """
    num_taps, groups = base.shape[0], delta.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    shifted = x.to(wide)
    total: Tensor | None = None
    for tap in range(num_taps):
        if tap:
            shifted = torch.nn.functional.pad(shifted[:, :-1], (0, 0, 1, 0))
        # groups as a dimension of their own: a weight is read once for all channels of its group
        factor = base[tap].to(wide).view(groups, -1) + delta[:, :, tap].to(wide)[..., None]  # [A, K, Q, D / Q]
        part = factor * shifted.view(factor.shape)
        total = part if total is None else total + part
    assert total is not None
    return total.flatten(-2).to(x.dtype)
