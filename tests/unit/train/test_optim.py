"""The learning-rate schedule and the optimizer's groups."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.config import Optim
from paceline.train.optim import EPS, MasterAdamW, learning_rate
from tests import tiny


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


def give_gradients(drafter: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@pytest.mark.parametrize("sums_gradients", [False, True])
def test_updates_are_those_of_pytorchs_adamw(sums_gradients: bool) -> None:
    """Divided by the weight, clipped, decayed (matrices only): five updates equal PyTorch's on the same gradients."""
    optim = Optim(weight_decay=0.1, clip=0.5)
    ours, theirs = tiny.drafter(), tiny.drafter()
    optimizer = MasterAdamW(ours, optim, torch.float32, sums_gradients)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=optim.betas, eps=EPS)
    for step in range(5):
        weight = torch.tensor(3.0 + step)
        give_gradients(theirs, step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            (mine * other.grad).sum().backward()  # as training has it: hooks see it
        for parameter in theirs.parameters():
            parameter.grad /= weight
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), optim.clip)
        for group in reference.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        reference.step()
        reference.zero_grad()
        optimizer.set_rate(1e-2 / (step + 1), step)
        torch.testing.assert_close(optimizer.apply(weight), norm)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
            assert one.grad is None
    assert float(norm) > optim.clip


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    """Many small gradients beside a large one survive, which a bfloat16 sum would lose."""
    drafter = tiny.drafter()
    optimizer = MasterAdamW(drafter, Optim(), torch.bfloat16, sums_gradients=True)
    for amount in [1.0] + [1e-3] * 64:
        sum(amount * parameter.sum() for parameter in drafter.parameters()).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.dtype == torch.bfloat16 and parameter.grad is None
        wanted = 1 + 64 * float(torch.tensor(1e-3).bfloat16())
        torch.testing.assert_close(optimizer.gradients()[name], torch.full(parameter.shape, wanted))
    optimizer.zero_grad()
    assert not any(total.any() for total in optimizer.gradients().values())


def test_masters_keep_what_copies_round_away() -> None:
    """Updates too small for bfloat16 add up in the masters, and the copies follow them rounded."""
    drafter = tiny.drafter()
    optimizer = MasterAdamW(drafter, Optim(warmup_ratio=0.0), torch.bfloat16, sums_gradients=False)
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    for step in range(20):
        for parameter in drafter.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.set_rate(1e-4, step)
        optimizer.apply(torch.ones(()))
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(optimizer.masters[name], before[name] - 20e-4, rtol=0, atol=1e-5)
        assert torch.equal(parameter, optimizer.masters[name].bfloat16())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_ends_all_updates(bad: float) -> None:
    """Weights and moments stay those of the last good update, also when later gradients are good."""
    drafter = tiny.drafter()
    optimizer = MasterAdamW(drafter, Optim(), torch.float32, sums_gradients=False)

    def update(poison: bool) -> Tensor:
        give_gradients(drafter, 1)
        if poison:
            drafter.norm.weight.grad[3] = bad
        optimizer.set_rate(1e-2, 0)
        return optimizer.apply(torch.ones(()))

    update(False)
    good = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    moments = {name: value.clone() for name, value in optimizer.exp_avg.items()}
    assert not optimizer.failed
    assert not update(True).isfinite() and optimizer.failed
    assert update(False).isfinite() and optimizer.failed
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, good[name]) and torch.equal(optimizer.exp_avg[name], moments[name])
