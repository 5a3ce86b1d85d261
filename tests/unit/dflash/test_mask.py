"""The visibility rule against plain loops, and the exact masks of cases T01 and T03."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from paceline.dflash.anchors import make_anchors
from paceline.dflash.mask import block_visible, context_visible, dense_mask
from tests import oracles
from tests.unit.dflash.strategies import Blocks, blocks


def picture(mask: torch.Tensor) -> list[str]:
    return ["".join("1" if seen else "." for seen in row) for row in mask.tolist()]


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_dense_mask_equals_the_oracle(b: Blocks) -> None:
    """Every (query slot, key) pair is visible exactly if the plain rule says so."""
    t = b.tokens
    got = dense_mask(b.anchors.positions, b.anchors.keep, b.starts, len(t.input_ids), b.block_size, b.causal, b.window)
    assert got.dtype == torch.bool
    wanted = oracles.dense_mask(b.anchor_list, t.document_ids.tolist(), b.block_size, b.causal, b.window)
    assert got.tolist() == wanted


@settings(max_examples=150, deadline=None)
@given(blocks())
def test_every_query_row_sees_its_own_slot(b: Blocks) -> None:
    """No row of the mask is without a key, empty slots included: its softmax would be NaN."""
    mask = dense_mask(
        b.anchors.positions, b.anchors.keep, b.starts, len(b.tokens.input_ids), b.block_size, b.causal, b.window
    )
    assert bool(mask[:, len(b.tokens.input_ids) :].diagonal().all())


def test_an_empty_slot_sees_no_context_wherever_it_points() -> None:
    """An empty slot's rows see their own block alone, also if its position were not 0."""
    anchors, keep = torch.tensor([3, 5]), torch.tensor([True, False])
    mask = dense_mask(anchors, keep, torch.zeros(2, dtype=torch.int64), 6, 2, False, None)
    assert picture(mask) == ["111...11.."] * 2 + ["........11"] * 2


def test_t01_overlapping_blocks() -> None:
    """Case T01: the exact 8 x 20 mask of two blocks that overlap."""
    anchors = make_anchors(torch.tensor([3, 5]))
    mask = dense_mask(anchors.positions, anchors.keep, torch.zeros(2, dtype=torch.int64), 12, 4, False, None)
    assert picture(mask) == ["111.........1111...."] * 4 + ["11111...........1111"] * 4
    assert mask.sum(1).tolist() == [7, 7, 7, 7, 9, 9, 9, 9]


def test_t03_context_ends_at_the_document() -> None:
    """Case T03: a block sees its own document before its anchor and no other."""
    anchors = make_anchors(torch.tensor([2, 4, 8, 10]))
    mask = dense_mask(anchors.positions, anchors.keep, torch.tensor([0, 0, 6, 6]), 12, 4, False, None)[:, :12]
    for block, visible in enumerate([[0, 1], [0, 1, 2, 3], [6, 7], [6, 7, 8, 9]]):
        for slot in range(4):
            assert mask[block * 4 + slot].nonzero().flatten().tolist() == visible


@pytest.mark.parametrize(
    ("window", "visible"),
    [(1, [[], []]), (2, [[9], []]), (3, [[8, 9], [9]]), (5, [[6, 7, 8, 9], [7, 8, 9]]), (99, [[*range(4, 10)]] * 2)],
)
def test_a_window_counts_the_slot_itself(window: int, visible: list[list[int]]) -> None:
    """A key is visible iff slot position - key < window: slot 0 of anchor 10 sees window - 1 context tokens."""
    for slot, keys in enumerate(visible):
        seen = context_visible(torch.arange(12), torch.tensor(4), torch.tensor(10), torch.tensor(slot), window)
        assert seen.nonzero().flatten().tolist() == keys


def test_a_window_bounds_the_block_both_ways() -> None:
    """Inside a block a window is symmetric, and causality hides later slots."""
    slots = torch.arange(4)
    symmetric = block_visible(slots[:, None], slots[None, :], False, 2)
    assert picture(symmetric) == ["11..", "111.", ".111", "..11"]
    assert picture(block_visible(slots[:, None], slots[None, :], True, 2)) == ["1...", "11..", ".11.", "..11"]
    assert picture(block_visible(slots[:, None], slots[None, :], True, None)) == ["1...", "11..", "111.", "1111"]
