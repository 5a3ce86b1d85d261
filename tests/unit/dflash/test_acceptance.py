"""Acceptance counts against a decode loop that is played token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.dflash.acceptance import Acceptance, leading_hits, walk
from tests import oracles


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 6), st.integers(1, 9), st.data())
def test_leading_hits_equal_the_oracle(num_blocks: int, num_predicted: int, data: st.DataObject) -> None:
    """Hits before the first miss, in every block."""
    row = st.lists(st.booleans(), min_size=num_predicted, max_size=num_predicted)
    hits = data.draw(st.lists(row, min_size=num_blocks, max_size=num_blocks))
    tensor = torch.tensor(hits, dtype=torch.bool).view(num_blocks, num_predicted)
    got = leading_hits(tensor)
    assert got.dtype == torch.int64 and got.tolist() == oracles.leading_hits(hits)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 8), st.data())
def test_walk_equals_a_decode_loop(answer: list[int], num_predicted: int, data: st.DataObject) -> None:
    """Rounds, committed tokens and per-slot counts are those of a real verification loop on the same answer."""
    last = len(answer) - 1
    drafts = [
        data.draw(st.lists(st.integers(0, 2), min_size=num_predicted, max_size=num_predicted)) for _ in range(last)
    ]
    leading = [
        oracles.leading_hits([[d == a for d, a in zip(drafts[p], answer[p + 1 :], strict=False)]])[0]
        for p in range(last)
    ]
    written, rounds, looked = oracles.decode(answer, lambda position: drafts[position])
    total = walk(leading, num_predicted)
    assert written == answer
    assert total.rounds == len(rounds)
    assert total.committed == sum(committed for _, committed in rounds) == last
    for slot in range(num_predicted):
        assert total.reached[slot] == len(looked.get(slot, []))
        assert total.accepted[slot] == sum(looked.get(slot, []))
    assert total.length == (last / len(rounds) if rounds else 0.0)


def test_a_walk_by_hand() -> None:
    """Three forwards commit 3, 1 and 2 tokens of a seven-token answer; the last one is cut short by the end."""
    total = walk([2, 0, 0, 0, 2, 1], 3)
    assert (total.rounds, total.committed) == (3, 6)
    assert total.length == pytest.approx(2.0)
    assert total.accepted == [2, 2, 0]
    assert total.reached == [3, 2, 1]
    assert total.per_position == [pytest.approx(2 / 3), 1.0, 0.0]


def test_an_answer_of_one_token_needs_no_forward() -> None:
    """The prefill's token alone: no round, length 0, rates 0, and no division by zero."""
    total = walk([], 3)
    assert (total.rounds, total.committed, total.length, total.per_position) == (0, 0, 0.0, [0.0, 0.0, 0.0])


def test_full_acceptance_is_the_block_size() -> None:
    """Where every draft is right a forward commits K tokens, and where none is, one."""
    right = [min(3, 12 - p) for p in range(12)]
    assert walk(right, 3).length == 4.0
    assert walk([0] * 12, 3).length == 1.0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.booleans(), min_size=4, max_size=4)), max_size=12))
def test_what_was_not_verified_was_not_reached(rounds: list[tuple[int, list[bool]]]) -> None:
    """Of rounds that verify the first few drafts each slot counts where the target looked at it, played one by one."""
    total, looked, hits, given_to_target = Acceptance(4), [0] * 4, [0] * 4, 0
    for num_verified, right in rounds:
        num_accepted = 0
        for j in range(num_verified):
            looked[j] += 1
            if not right[j]:
                break
            hits[j] += 1
            num_accepted += 1
        given_to_target += num_verified
        total.add_round(num_accepted, num_accepted + 1, num_verified)
    assert (total.reached, total.accepted, total.verified) == (looked, hits, given_to_target)
    assert total.verified_per_round == (given_to_target / len(rounds) if rounds else 0.0)
    assert total.verified_frac == (given_to_target / len(rounds) / 4 if rounds else 0.0)
    assert total.acceptance_rate == (sum(hits) / given_to_target if given_to_target else 0.0)


def test_counts_add_up() -> None:
    """Answers are summed first and divided last."""
    total = walk([2, 0, 0], 2)
    total += walk([0, 0, 0, 0], 2)
    assert (total.rounds, total.committed, total.length) == (5, 7, 7 / 5)
    assert total.reached == [5, 1] and total.accepted == [1, 1]
    assert total.verified == 2 + (2 + 2 + 2 + 1)  # the last rounds have fewer tokens left


def test_separate_counts_do_not_share_lists() -> None:
    """Two fresh counts are independent."""
    one, other = Acceptance(2), Acceptance(2)
    one.add_round(1, 2)
    assert other.reached == [0, 0] and one.reached == [1, 1] and one.accepted == [1, 0]
