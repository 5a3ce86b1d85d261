"""The one-pass update against torch's own optimizer, and the norm against plain sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.kernels.adamw import adamw_, squared_norm

BETAS, EPS = (0.9, 0.95), 1e-8
NO_FACTOR = [0.0, math.inf, -math.inf, math.nan]
"""Factors of the gradient that mean: leave everything as it is."""


def hyper_at(step: int, lr: float, factor: float = 1.0) -> Tensor:
    """What the update reads from the device at a step, counted from 1."""
    return torch.tensor([lr, 1 - BETAS[0] ** step, 1 - BETAS[1] ** step, factor])


def state(shape: tuple[int, ...], copy_dtype: torch.dtype | None = torch.bfloat16, device: str = "cpu") -> list:
    """master, exp_avg, exp_avg_sq and copy in the middle of a run."""
    g = torch.Generator().manual_seed(1)
    master, moment = torch.randn(shape, generator=g), 0.1 * torch.randn(shape, generator=g)
    tensors = [master, moment, moment**2 + 0.01, None if copy_dtype is None else master.to(copy_dtype)]
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def assert_follows_torch(
    shape: tuple[int, ...], grad_dtype: torch.dtype, weight_decay: float, device: str, num_steps: int = 20
) -> None:
    """Over some steps with a changing rate, weights and moments stay within a few ulp of `torch.optim.AdamW`."""
    g = torch.Generator().manual_seed(0)
    master = torch.randn(shape, generator=g).to(device)
    theirs = master.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], betas=BETAS, eps=EPS, weight_decay=weight_decay, foreach=False)
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    copy = master.bfloat16()
    for step in range(1, num_steps + 1):
        lr, factor = 1e-2 / step, 0.25 * step
        grad = torch.randn(shape, generator=g).to(device, grad_dtype)
        hyper = hyper_at(step, lr, factor).to(device)
        adamw_(master, exp_avg, exp_avg_sq, grad, copy, hyper, betas=BETAS, eps=EPS, weight_decay=weight_decay)
        theirs.grad = grad.float() * factor
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        torch.testing.assert_close(master, theirs.detach(), rtol=1e-6, atol=1e-8)
        assert torch.equal(copy, master.bfloat16())
    # float32 sums of numbers of either sign: a few ulp of the numbers, not of what is left of them
    torch.testing.assert_close(exp_avg, optimizer.state[theirs]["exp_avg"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exp_avg_sq, optimizer.state[theirs]["exp_avg_sq"], rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(1,), (37,), (5, 300)])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_follows_torch(shape: tuple[int, ...], grad_dtype: torch.dtype, weight_decay: float) -> None:
    """Weights and moments are those of `torch.optim.AdamW`, the copy is the master rounded."""
    assert_follows_torch(shape, grad_dtype, weight_decay, "cpu")


@pytest.mark.parametrize("factor", NO_FACTOR)
def test_a_factor_of_nothing_changes_nothing(factor: float) -> None:
    """With a factor of 0 or none that is finite everything stays, whatever the gradient holds."""
    tensors = state((300,))
    before = [tensor.clone() for tensor in tensors]
    master, exp_avg, exp_avg_sq, copy = tensors
    grad = torch.full((300,), math.nan)
    adamw_(master, exp_avg, exp_avg_sq, grad, copy, hyper_at(3, 1e-2, factor), betas=BETAS, eps=EPS, weight_decay=0.1)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


def test_without_a_copy_and_with_parameters() -> None:
    """The copy may be left out, or have another type; leaves that require gradients are updated like any tensor."""
    with_copy, without = state((40,), torch.float16), state((40,), None)
    without[0].requires_grad_()
    for master, exp_avg, exp_avg_sq, copy in (with_copy, without):
        adamw_(
            master, exp_avg, exp_avg_sq, torch.ones(40), copy, hyper_at(3, 1e-2), betas=BETAS, eps=EPS, weight_decay=0.1
        )
    assert torch.equal(with_copy[0], without[0]) and torch.equal(with_copy[3], with_copy[0].half())
    assert without[0].requires_grad and without[0].grad is None


def test_no_elements() -> None:
    """A tensor without elements is updated to itself."""
    empty = torch.zeros(0, 4)
    adamw_(empty, empty, empty, empty, None, hyper_at(1, 1e-2), betas=BETAS, eps=EPS, weight_decay=0.1)


def test_squared_norm() -> None:
    """It is the sum of all squares, in float64, over tensors of any shapes and types."""
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=g) for shape in [(3,), (40, 50), (), (0, 2), (7, 1, 9)]]
    grads += [torch.randn(1000, generator=g).bfloat16()]
    wanted = math.fsum(x * x for grad in grads for x in grad.double().flatten().tolist())
    found = squared_norm(grads)
    assert found.dtype == torch.float64 and found.shape == ()
    assert found.item() == pytest.approx(wanted, rel=1e-6)
    assert torch.equal(found, squared_norm(iter(grads)))


def test_squared_norm_of_a_bad_gradient() -> None:
    """One NaN or infinite element shows; large ones do not overflow; nothing at all has norm 0."""
    assert squared_norm([torch.ones(3), torch.tensor([1.0, math.nan])]).isnan()
    assert squared_norm([torch.ones(3).bfloat16(), torch.tensor([math.inf])]).isinf()
    assert squared_norm([torch.full((4,), 1e15), torch.full((5,), 2e15)]).item() == pytest.approx(2.4e31, rel=1e-6)
    assert squared_norm([]).item() == 0.0
