"""The norm and its written-out gradient against autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels.rms_norm import rms_norm

EPS = 1e-5


def by_the_book(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


@pytest.mark.parametrize("shape", [(7,), (5, 8), (3, 4, 9, 16), (0, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Value and gradients are those of the definition within rounding, for any leading dimensions."""
    generator = torch.Generator().manual_seed(len(shape))
    x = (3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    weight = (0.5 + torch.rand(shape[-1], generator=generator)).requires_grad_()
    grad = torch.randn(shape, generator=generator).to(dtype)
    found, wanted = rms_norm(x, weight, EPS), by_the_book(x, weight)
    assert found.dtype == dtype
    gradients = torch.autograd.grad(found, (x, weight), grad)
    expected = torch.autograd.grad(wanted, (x, weight), grad)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip((found, *gradients), (wanted, *expected), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **tolerance)
