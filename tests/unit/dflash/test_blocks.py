"""Block inputs, positions, labels and weights against plain loops, and the exact values of cases T02 and T03."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.dflash.anchors import make_anchors
from paceline.dflash.blocks import block_labels, block_positions, decay_weights, make_noise_blocks, tokens_left
from tests import oracles
from tests.unit.dflash.strategies import Blocks, blocks


@settings(max_examples=150, deadline=None)
@given(blocks(), st.integers(100, 200))
def test_noise_blocks_equal_the_oracle(b: Blocks, mask_token_id: int) -> None:
    """Slot 0 holds the anchor's token, all other slots and all slots of empty blocks the mask token."""
    got = make_noise_blocks(b.tokens.input_ids, b.anchors, b.block_size, mask_token_id)
    assert got.dtype == torch.int64
    ids = b.tokens.input_ids.tolist()
    assert got.tolist() == oracles.noise_blocks(ids, b.anchor_list, b.block_size, mask_token_id)


@settings(max_examples=150, deadline=None)
@given(blocks())
def test_block_positions_equal_the_oracle(b: Blocks) -> None:
    """Slot k of a block stands k after the anchor, counted from the start of the anchor's document."""
    got = block_positions(b.anchors, b.tokens.position_ids, b.block_size)
    assert got.shape == (len(b.anchor_list), b.block_size) and got.dtype == torch.int64
    expected = oracles.block_positions(b.anchor_list, b.tokens.document_ids.tolist(), b.block_size)
    for row, wanted in zip(got.tolist(), expected, strict=True):
        assert wanted is None or row == wanted
        assert min(row) >= 0


@settings(max_examples=300, deadline=None)
@given(blocks(), st.sampled_from([0, 1]))
def test_labels_equal_the_oracle(b: Blocks, label_shift: int) -> None:
    """Labels are the tokens after the anchor; those past its document, unsupervised or of empty blocks do not count."""
    t = b.tokens
    labels, valid = block_labels(t.input_ids, t.loss_mask, t.document_ids, b.anchors, b.block_size, label_shift)
    wanted_labels, wanted_valid = oracles.block_labels(oracles.lists(t), b.anchor_list, b.block_size, label_shift)
    assert labels.tolist() == wanted_labels and valid.tolist() == wanted_valid
    assert labels.dtype == torch.int64 and valid.dtype == torch.bool


@settings(max_examples=150, deadline=None)
@given(blocks(), st.integers(2, 9))
def test_no_scored_slot_is_in_another_document(b: Blocks, block_size: int) -> None:
    """T03's invariant: a scored (anchor, slot) pair lies in one document, whatever the anchors."""
    t = b.tokens
    _, valid = block_labels(t.input_ids, t.loss_mask, t.document_ids, b.anchors, block_size)
    for anchor, slot in zip(*[x.tolist() for x in valid.nonzero(as_tuple=True)], strict=True):
        a = b.anchor_list[anchor]
        assert a is not None and t.document_ids[a] == t.document_ids[a + slot + 1] >= 0


@pytest.mark.parametrize("gamma", [0.5, 4.0, 7.0, 100.0])
@pytest.mark.parametrize("num_predicted", [1, 3, 15])
def test_weights_equal_the_oracle(num_predicted: int, gamma: float) -> None:
    """The first predicted token weighs 1 and each later one less by a factor exp(-1 / gamma)."""
    got = decay_weights(num_predicted, gamma)
    assert got.dtype == torch.float32 and got[0] == 1.0
    torch.testing.assert_close(got, torch.tensor(oracles.decay_weights(num_predicted, gamma)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("num_predicted", "gamma"), [(3, 0.0), (3, -1.0), (0, 7.0)])
def test_bad_weights_are_refused(num_predicted: int, gamma: float) -> None:
    """A decay length of 0 or less, or no predicted token, is an error."""
    with pytest.raises(ValueError, match="gamma"):
        decay_weights(num_predicted, gamma)


def test_t02_label_alignment_and_decay() -> None:
    """Case T02: exact block inputs, positions, labels and weights."""
    ids = torch.arange(100, 112)
    mask = torch.tensor([0, 0, 0] + [1] * 9, dtype=torch.bool)
    docs, positions = torch.zeros(12, dtype=torch.int32), torch.arange(12)
    anchors = make_anchors(torch.tensor([3, 8]))
    assert make_noise_blocks(ids, anchors, 4, 267).tolist() == [[103, 267, 267, 267], [108, 267, 267, 267]]
    assert block_positions(anchors, positions, 4).tolist() == [[3, 4, 5, 6], [8, 9, 10, 11]]
    labels, valid = block_labels(ids, mask, docs, anchors, 4)
    assert labels.tolist() == [[104, 105, 106], [109, 110, 111]]
    weights = torch.where(valid, decay_weights(3, 7.0), 0.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.866878, 0.751477]] * 2), rtol=0, atol=1e-6)


def test_label_shift_adds_the_anchor_slot() -> None:
    """With a shift of 1 slot k predicts anchor + k + 1, so there are K columns that start with the same token."""
    ids, ones = torch.arange(100, 112), torch.ones(12, dtype=torch.bool)
    anchors = make_anchors(torch.tensor([3, 8]))
    labels, valid = block_labels(ids, ones, torch.zeros(12, dtype=torch.int32), anchors, 4, label_shift=1)
    assert labels.tolist() == [[104, 105, 106, 107], [109, 110, 111, 0]]
    assert valid.tolist() == [[True] * 4, [True, True, True, False]]


def test_t03_anchor_near_document_end() -> None:
    """Case T03: slots past the document's end or the row weigh nothing, and positions restart in each document."""
    ids = torch.arange(100, 112)
    docs = torch.tensor([0] * 6 + [1] * 6)
    positions = torch.tensor([*range(6), *range(6)])
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    anchors = make_anchors(torch.tensor([2, 4, 8, 10]))
    labels, valid = block_labels(ids, mask, docs, anchors, 4)
    weights = torch.where(valid, decay_weights(3, 7.0), 0.0)
    whole, cut = [1.0, 0.866878, 0.751477], [1.0, 0.0, 0.0]
    torch.testing.assert_close(weights, torch.tensor([whole, cut, whole, cut]), rtol=0, atol=1e-6)
    assert labels.tolist() == [[103, 104, 105], [105, 0, 0], [109, 110, 111], [111, 0, 0]]
    assert block_positions(anchors, positions, 4).tolist() == [[2, 3, 4, 5], [4, 5, 6, 7]] * 2


@settings(max_examples=150, deadline=None)
@given(blocks(), st.integers(1, 12))
def test_tokens_left_equal_the_oracle(b: Blocks, at_most: int) -> None:
    """Supervised tokens after the anchor are counted up to the first gap, the document's end or the limit."""
    mask, docs = b.tokens.loss_mask.tolist(), b.tokens.document_ids.tolist()
    wanted = []
    for anchor in b.anchor_list:
        count = 0
        while anchor is not None and count < at_most:
            position = anchor + count + 1
            if position >= len(mask) or not mask[position] or docs[position] != docs[anchor]:
                break
            count += 1
        wanted.append(count)
    assert tokens_left(b.tokens.loss_mask, b.tokens.document_ids, b.anchors, at_most).tolist() == wanted
