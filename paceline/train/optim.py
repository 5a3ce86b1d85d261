"""AdamW over float32 master weights, and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from paceline.config import Optim


def learning_rate(step: int, total_steps: int, optim: Optim) -> float:
    """Rate of the update that follows `step` finished ones: a linear rise, then half a cosine to its floor.

    The first update already moves (it has ``lr / warmup steps``), and the last one has the floor plus one cosine step.
    """
    warmup = math.ceil(optim.warmup_ratio * total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * cosine)


def build_optimizer(drafter: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """AdamW; weight decay acts on matrices only."""
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    vectors = [p for p in drafter.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
