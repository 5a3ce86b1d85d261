"""The learning-rate schedule and the optimizer's groups."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.config import Optim
from paceline.train.optim import build_optimizer, learning_rate


def test_the_rate_rises_linearly_and_falls_by_a_cosine() -> None:
    """Ten steps, four of them warm-up: quarters up to the peak, then half a cosine to its floor."""
    optim = Optim(lr=1e-3, warmup_ratio=0.4, min_lr_ratio=0.1)
    rates = [learning_rate(step, 10, optim) for step in range(10)]
    assert rates[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    cosine = [0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]
    assert rates[4:] == pytest.approx([1e-3 * (0.1 + 0.9 * c) for c in cosine])


def test_no_warm_up_starts_at_the_peak() -> None:
    """With a ratio of 0 the first update has the full rate, also in a run of one step."""
    assert learning_rate(0, 1, Optim(lr=1e-3, warmup_ratio=0.0)) == 1e-3


def test_weight_decay_spares_norms() -> None:
    """Matrices decay, vectors do not."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=True))
    matrices, vectors = build_optimizer(module, Optim(weight_decay=0.1)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert [p.dim() for p in matrices["params"]] == [2] and [p.dim() for p in vectors["params"]] == [1]
