"""Anchor eligibility and keyed sampling against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.dflash.anchors import (
    batch_generator,
    depths_in_documents,
    eligible_positions,
    make_anchors,
    one_of_each_stratum,
    sample_anchors,
)
from paceline.records import TokenBatch
from tests import oracles, tiny
from tests.unit.dflash.strategies import rows


@settings(max_examples=200, deadline=None)
@given(rows())
def test_eligible_positions_equal_the_oracle(tokens: TokenBatch) -> None:
    """A position is eligible exactly if it and its successor in the same document are supervised."""
    _, mask, docs = oracles.lists(tokens)
    got = eligible_positions(tokens.loss_mask, tokens.document_ids)
    assert got.dtype == torch.bool and got.shape == tokens.loss_mask.shape
    assert got.nonzero().flatten().tolist() == oracles.eligible_positions(mask, docs)


def test_supervised_padding_is_never_eligible() -> None:
    """Padding belongs to no document, even under a loss mask that is wrong there."""
    mask, docs = torch.ones(6, dtype=torch.bool), torch.tensor([0, 0, -1, -1, -1, -1])
    assert eligible_positions(mask, docs).tolist() == [True, False, False, False, False, False]


@settings(max_examples=200, deadline=None)
@given(rows(), st.integers(0, 40), st.integers(0, 2**40), st.integers(0, 10**6))
def test_a_sample_is_distinct_sorted_eligible_and_as_large_as_possible(
    tokens: TokenBatch, num_anchors: int, seed: int, batch: int
) -> None:
    """Exactly `num_anchors` slots: every eligible position if they are few, else that many of them, ascending."""
    _, mask, docs = oracles.lists(tokens)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, num_anchors, batch_generator(seed, batch))
    positions, keep = anchors.positions.tolist(), anchors.keep.tolist()
    assert oracles.is_allowed_sample(positions, keep, mask, docs, num_anchors)
    assert anchors.num_kept == sum(keep)
    assert anchors.positions.dtype == torch.int64 and anchors.keep.dtype == torch.bool


def sample(seed: int, batch: int, num_anchors: int = 12) -> list[int]:
    tokens = tiny.row([60, 50, 10], 128, supervised=1.0)
    return sample_anchors(
        tokens.loss_mask, tokens.document_ids, num_anchors, batch_generator(seed, batch)
    ).positions.tolist()


def test_the_same_key_gives_the_same_anchors() -> None:
    """Anchors are a pure function of (row, seed, batch number), whatever was drawn before."""
    first = sample(3, 7)
    torch.manual_seed(99)
    np.random.seed(99)
    sample(3, 8)
    assert sample(3, 7) == first


def test_another_batch_or_seed_gives_other_anchors() -> None:
    """Every (seed, batch) key has its own draw, also where the two numbers are swapped or add up to the same."""
    draws = [tuple(sample(seed, batch)) for seed in range(6) for batch in range(6)]
    assert len(set(draws)) == len(draws)


def test_the_draw_of_a_key_never_changes() -> None:
    """The draw of a key is pinned: if a library changes it, resumed runs stop being the same experiment."""
    assert sample(0, 0) == [1, 4, 8, 19, 29, 33, 55, 69, 76, 91, 94, 107]
    assert batch_generator(5, 11).integers(0, 1000, 4).tolist() == [335, 441, 255, 321]


def test_anchors_are_uniform_over_eligible_positions() -> None:
    """Over many batches each eligible position is drawn equally often, in long documents as in short ones."""
    tokens = tiny.row([40, 4, 12], 60, supervised=1.0)
    counts = np.zeros(60)
    draws, num_anchors = 2000, 9
    for batch in range(draws):
        anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, num_anchors, batch_generator(1, batch))
        counts[anchors.positions.numpy()] += 1
    eligible = oracles.eligible_positions(*oracles.lists(tokens)[1:])
    expected = draws * num_anchors / len(eligible)
    assert counts.sum() == counts[eligible].sum() == draws * num_anchors
    chi_square = float(((counts[eligible] - expected) ** 2 / expected).sum())
    freedom = len(eligible) - 1
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5
    assert np.abs(counts[eligible] / expected - 1).max() < 0.25


@settings(max_examples=200, deadline=None)
@given(rows(), st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 10**6))
def test_a_stratified_sample_has_one_of_each_stratum(
    tokens: TokenBatch, num_anchors: int, seed: int, batch: int
) -> None:
    """It is an allowed sample; all positions if they are few, else one from each of `num_anchors` parts by depth."""
    _, mask, docs = oracles.lists(tokens)
    generator = batch_generator(seed, batch)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, num_anchors, generator, stratify=True)
    positions, keep = anchors.positions.tolist(), anchors.keep.tolist()
    assert oracles.is_allowed_sample(positions, keep, mask, docs, num_anchors)
    kept = positions[: anchors.num_kept]
    assert oracles.is_one_of_each_stratum(kept, mask, docs, max(len(kept), 1))


def test_the_stratified_draw_of_a_key_never_changes() -> None:
    """Pinned like the other draw."""
    tokens = tiny.row([60, 50, 10], 128, supervised=1.0)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 12, batch_generator(0, 0), stratify=True)
    assert anchors.positions.tolist() == [8, 20, 25, 30, 35, 43, 49, 65, 71, 76, 107, 112]


@settings(max_examples=100, deadline=None)
@given(rows())
def test_depths_count_from_the_start_of_the_document(tokens: TokenBatch) -> None:
    """Inside documents depth is the position id of the row."""
    docs = tokens.document_ids.numpy()
    depths = depths_in_documents(docs)
    assert depths[docs >= 0].tolist() == tokens.position_ids.numpy()[docs >= 0].tolist()


@pytest.mark.parametrize(
    ("population", "strata"), [(7, 3), (7, 5), (12, 4), (11, 10), (9, 1), (6, 6), (3, 2), (40, 17), (23, 7)]
)
def test_strata_give_every_number_the_same_chance(population: int, strata: int) -> None:
    """Each of N numbers is drawn A / N of the time, those on the borders of strata too; all of a draw differ."""
    draws, counts = 8000, np.zeros(population)
    generator = np.random.default_rng(0)
    for _ in range(draws):
        drawn = one_of_each_stratum(population, strata, generator)
        assert (np.diff(drawn) > 0).all()
        counts[drawn] += 1
    chance = strata / population
    assert counts.sum() == draws * strata
    assert (np.abs(counts - draws * chance) <= 4.5 * np.sqrt(draws * chance * (1 - chance))).all()


def test_stratified_anchors_cover_depth_evenly() -> None:
    """A row's share of deep anchors is that of deep positions to within one anchor; drawn at random it scatters."""
    tokens = tiny.row([400, 100, 90, 50, 10], 660, supervised=1.0)
    docs = tokens.document_ids
    depths = depths_in_documents(docs.numpy())
    eligible = eligible_positions(tokens.loss_mask, docs).numpy()
    wanted = 60 * (eligible & (depths >= 100)).sum() / eligible.sum()

    def deep(batch: int, stratify: bool) -> int:
        anchors = sample_anchors(tokens.loss_mask, docs, 60, batch_generator(1, batch), stratify=stratify)
        return int((depths[anchors.positions.numpy()] >= 100).sum())

    assert max(abs(deep(batch, True) - wanted) for batch in range(200)) < 1
    assert max(abs(deep(batch, False) - wanted) for batch in range(200)) > 5


def test_t03_anchors_near_document_ends() -> None:
    """Case T03, partial blocks allowed: 2, 3, 4, 8, 9, 10 may be drawn; 5 and 11, with nothing to predict, never."""
    docs = torch.tensor([0] * 6 + [1] * 6)
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert eligible_positions(mask, docs).nonzero().flatten().tolist() == [2, 3, 4, 8, 9, 10]
    drawn = {p for b in range(50) for p in sample_anchors(mask, docs, 4, batch_generator(0, b)).positions.tolist()}
    assert drawn == {2, 3, 4, 8, 9, 10}


def test_t04_nothing_supervised_leaves_every_slot_empty() -> None:
    """Case T04: a row with nothing supervised gives empty slots, not an error; too short documents as well."""
    docs = torch.zeros(12, dtype=torch.int32)
    anchors = sample_anchors(torch.zeros(12, dtype=torch.bool), docs, 3, batch_generator(0, 0))
    assert anchors.positions.tolist() == [0, 0, 0] and anchors.keep.tolist() == [False] * 3 and anchors.num_kept == 0
    lone = torch.tensor([0, 0, 1, 0, 1], dtype=torch.bool)  # never two in a row
    assert sample_anchors(lone, docs[:5], 3, batch_generator(0, 0)).num_kept == 0


def test_make_anchors_pads_and_refuses_too_many() -> None:
    """Given positions come first, empty slots after; more positions than slots is an error."""
    anchors = make_anchors(torch.tensor([4, 9]), 4)
    assert anchors.positions.tolist() == [4, 9, 0, 0] and anchors.keep.tolist() == [True, True, False, False]
    assert make_anchors(torch.tensor([4, 9])).keep.tolist() == [True, True]
    with pytest.raises((ValueError, RuntimeError)):
        make_anchors(torch.tensor([1, 2, 3]), 2)
