"""The learning-rate schedule and the optimizer's groups."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.config import Optim, load_config
from paceline.errors import ConfigError
from paceline.train.optim import EPS, MasterAdamW, is_hidden_matrix, learning_rate
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


@pytest.mark.parametrize(
    ("sums_gradients", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_matrices_of_layers_are_updated_by_muon(sums_gradients: bool, dtype: torch.dtype) -> None:
    """Five updates equal those of PyTorch's Muon for matrices of layers, and its AdamW for all else."""
    optim = Optim(kind="muon", weight_decay=0.1, clip=0.5)
    ours, theirs = (tiny.drafter(tiny.shape_of_kind("dspark")) for _ in range(2))
    optimizer = MasterAdamW(ours, optim, dtype, sums_gradients)
    named = dict(theirs.named_parameters())
    hidden = [p for name, p in named.items() if is_hidden_matrix(name, p)]
    assert len(hidden) == 2 * 7 + 1  # projections of attention and MLP, and what joins the taps
    chosen = {id(p) for p in hidden}
    rest = [p for p in named.values() if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=optim.betas, eps=EPS)
    muon = torch.optim.Muon(hidden, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        weight = torch.tensor(3.0 + step)
        give_gradients(theirs, step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = other.grad.to(dtype).float()
            (mine * other.grad.to(dtype)).sum().backward()
        for parameter in theirs.parameters():
            parameter.grad /= weight
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), optim.clip)
        for reference in (adamw, muon):
            for group in reference.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            reference.step()
            reference.zero_grad()
        optimizer.set_rate(1e-2 / (step + 1), step)
        optimizer.apply(weight)
    for name, other in named.items():
        torch.testing.assert_close(
            optimizer.masters[name], other, rtol=1e-3, atol=3e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert torch.equal(ours.get_parameter(name), optimizer.masters[name].to(dtype))


def test_muon_leaves_everything_as_it_is_after_a_gradient_that_is_not_finite() -> None:
    """Masters, momentum and copies; a later good gradient changes nothing either."""
    drafter = tiny.drafter()
    optimizer = MasterAdamW(drafter, Optim(kind="muon"), torch.bfloat16, sums_gradients=True)
    for step, amount in enumerate((1.0, float("nan"), 1.0)):
        sum((amount * parameter).sum() for parameter in drafter.parameters()).backward()
        optimizer.set_rate(1e-2, step)
        optimizer.apply(torch.tensor(2.0))
        if step == 0:
            kept = {name: each.clone() for name, each in [*optimizer.masters.items()]}
            moved = {name: each.clone() for name, each in optimizer.exp_avg.items()}
    assert all(torch.equal(kept[name], optimizer.masters[name]) for name in kept)
    assert all(torch.equal(moved[name], optimizer.exp_avg[name]) for name in moved)
    assert float(optimizer.failed) == 1


def test_muon_of_several_drafters_is_refused() -> None:
    """Their matrices lie in parts."""
    with pytest.raises(ConfigError, match="optim.kind=muon with topology.drafters=2"):
        load_config(None, ["target.path=t", "data.path=d", "optim.kind=muon", "topology.drafters=2"])
