"""Acceptance counts against a decode loop that is played token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.dflash.acceptance import Acceptance, estimated_rounds, leading_hits, walk
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


def answers_by_stretches(random_: np.random.Generator) -> list[np.ndarray]:
    """Leading hits at every position of 60 answers, whose tokens are hit or missed by stretches, easy and hard ones."""
    answers = []
    for _ in range(60):
        chances = np.repeat(random_.choice([0.3, 0.6, 0.97], size=random_.integers(2, 8)), 40)
        is_hit = random_.random(len(chances)) < chances
        leading = [int(np.argmin([*is_hit[i + 1 : i + 16], False])) for i in range(len(is_hit) - 1)]
        answers.append(np.array(leading))
    return answers


@pytest.mark.parametrize("share", [1 / 6, 1 / 16])
def test_random_anchors_tell_what_a_decode_loop_commits(share: float) -> None:
    """Within a few per cent; their mean is far above it, as a loop stops seldom where it moves fast."""
    random_ = np.random.default_rng(0)
    answers = answers_by_stretches(random_)
    decoded = Acceptance(15)
    committed, documents = [], []
    for number, leading in enumerate(answers):
        decoded += walk(leading.tolist(), 15)
        chosen = np.flatnonzero(random_.random(len(leading)) < share)
        committed += np.minimum(leading[chosen] + 1, len(leading) - chosen).tolist()
        documents += [number] * len(chosen)
    estimate = len(committed) / float(estimated_rounds(torch.tensor(committed), torch.tensor(documents)))
    assert estimate == pytest.approx(decoded.length, rel=0.06)
    assert np.mean(committed) > 1.25 * decoded.length


def test_a_neighbourhood_ends_with_its_document_and_empty_slots_count_nothing() -> None:
    """By hand: two documents that do not see each other, and slots without an anchor behind them."""
    rounds = estimated_rounds(torch.tensor([1, 3, 8, 8, 0, 0]), torch.tensor([0, 0, 9, 9, 0, 0]))
    assert float(rounds) == pytest.approx(2 / 2 + 2 / 8)
    far = estimated_rounds(torch.tensor([1, 1, 1, 1, 5]), torch.zeros(5, dtype=torch.int64))  # 5 is 4 from the first
    assert float(far) == pytest.approx(1 + 5 / 9 + 5 / 9 + 5 / 9 + 4 / 8)
    assert float(estimated_rounds(torch.zeros(4), torch.zeros(4, dtype=torch.int64))) == 0
