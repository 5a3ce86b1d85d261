"""The convolution along a block against plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.dflash.convolution import block_conv


def case(taps: int, block: int = 5, blocks: int = 3, width: int = 6, groups: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(taps)
    size = (blocks, block, taps, groups)
    return (
        torch.randn(blocks, block, width, generator=g, dtype=torch.float64),
        torch.randn(taps, width, generator=g, dtype=torch.float64),
        torch.randn(size, generator=g, dtype=torch.float64),
    )


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_it_is_the_sum_over_taps(taps: int) -> None:
    """Each channel of each slot, by loops; blocks of a size that is no power of two."""
    x, base, delta = case(taps)
    out = block_conv(x, base, delta)
    for a in range(3):
        for i in range(5):
            for c in range(6):
                wanted = sum((base[t, c] + delta[a, i, t, c // 2]) * x[a, i - t, c] for t in range(taps) if i - t >= 0)
                torch.testing.assert_close(out[a, i, c], wanted)


def test_blocks_do_not_see_each_other() -> None:
    """The last slot of a block changes nothing in the next one, and slot 0 has nothing but itself."""
    x, base, delta = case(2)
    before = block_conv(x, base, delta)
    moved = x.clone()
    moved[0, 4] += 1.0
    after = block_conv(moved, base, delta)
    assert torch.equal(before[1:], after[1:]) and torch.equal(before[0, :4], after[0, :4])
    torch.testing.assert_close(before[:, 0], x[:, 0] * (base[0] + delta[:, 0, 0].repeat_interleave(2, dim=-1)))


def test_the_weights_are_those_of_the_slot_that_is_made() -> None:
    """A weight of slot 3 changes slot 3 alone, in the channels of its group."""
    x, base, delta = case(2)
    changed = delta.clone()
    changed[1, 3, 1, 2] += 1.0
    difference = block_conv(x, base, changed) - block_conv(x, base, delta)
    wanted = torch.zeros_like(x)
    wanted[1, 3, 4:] = x[1, 2, 4:]
    torch.testing.assert_close(difference, wanted)


def test_gradients() -> None:
    """By finite differences in float64."""
    inputs = [each.requires_grad_() for each in case(2, block=3, blocks=2, width=4, groups=2)]
    assert torch.autograd.gradcheck(block_conv, inputs)


def test_it_rounds_once() -> None:
    """In bfloat16 it is the float32 sum, rounded."""
    x, base, delta = (each.bfloat16() for each in case(2))
    wanted = block_conv(x.float(), base.float(), delta.float()).bfloat16()
    assert torch.equal(block_conv(x, base, delta), wanted)
