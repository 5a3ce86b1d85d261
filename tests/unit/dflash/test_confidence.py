"""How many tokens to verify: cut-off and sharing against plain loops, and that sharing bends no distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.dflash.confidence import cut_below, share_lengths

CONFIDENCES = st.lists(
    st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]) | st.floats(0, 1), max_size=5), min_size=1, max_size=5
)
SPEEDS = st.lists(st.floats(0.01, 10), min_size=40, max_size=40)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(0, 1))
def test_a_cut_is_before_the_first_that_is_below(rows: list[list[float]], threshold: float) -> None:
    """Leading tokens of enough confidence, to be counted in a loop; equal is enough."""
    wanted = []
    for row in rows:
        n = 0
        while n < len(row) and row[n] >= threshold:
            n += 1
        wanted.append(n)
    found = cut_below(torch.tensor(rows, dtype=torch.float64), threshold)
    assert found.dtype == torch.int64 and found.tolist() == wanted


def test_a_threshold_of_zero_cuts_nothing() -> None:
    """Also where the drafter is sure of nothing; at 1 only certainty is left."""
    assert cut_below(torch.tensor([[0.0, 0.0], [1.0, 0.3]]), 0.0).tolist() == [2, 2]
    assert cut_below(torch.tensor([[0.0, 0.0], [1.0, 0.3]]), 1.0).tolist() == [0, 1]


def shared_by_hand(rows: list[list[float]], speed: Callable[[int], float]) -> list[int]:
    """One token at a time: the best next one of any request, as long as it brings more tokens a second."""
    lengths, survival, expected = [0] * len(rows), [1.0] * len(rows), float(len(rows))
    while True:
        nexts = [(survival[r] * row[lengths[r]], -r) for r, row in enumerate(rows) if lengths[r] < len(row)]
        if not nexts:
            return lengths
        gain, request = max(nexts)
        num_tokens = len(rows) + sum(lengths)
        if (expected + gain) * speed(num_tokens + 1) <= expected * speed(num_tokens):
            return lengths
        lengths[-request] += 1
        survival[-request] = gain
        expected += gain


@settings(max_examples=300, deadline=None)
@given(CONFIDENCES, SPEEDS)
def test_sharing_takes_the_best_next_token_until_one_does_not_pay(rows: list[list[float]], speeds: list[float]) -> None:
    """Admitted are leading tokens of every request, in the order of survival, up to the first that does not pay."""
    assert share_lengths(rows, lambda n: speeds[n]) == shared_by_hand(rows, lambda n: speeds[n])


@settings(max_examples=200, deadline=None)
@given(CONFIDENCES, st.data())
def test_no_token_decides_on_itself_or_on_those_before_it(rows: list[list[float]], data: st.DataObject) -> None:
    """What a drafted token changes are the confidences behind it: whether it is verified itself stays.

    Without this the output's distribution would bend, whatever the speeds are.
    """
    request = data.draw(st.integers(0, len(rows) - 1))
    if not rows[request]:
        return
    token = data.draw(st.integers(0, len(rows[request]) - 1))
    behind = data.draw(st.lists(st.floats(0, 1), min_size=len(rows[request]), max_size=len(rows[request])))
    speeds = data.draw(SPEEDS)
    other = [list(row) for row in rows]
    other[request][token + 1 :] = behind[token + 1 :]
    one, two = (share_lengths(each, lambda n: speeds[n])[request] for each in (rows, other))
    assert (one > token) == (two > token)
    assert one == two or min(one, two) > token


def test_nothing_is_verified_where_nothing_pays() -> None:
    """Forwards that slow down at once, and confidences of zero, leave every request its one plain token."""
    assert share_lengths([[0.9, 0.9], [0.8]], lambda n: 1 / n**2) == [0, 0]
    assert share_lengths([[0.0, 0.9], [0.0]], lambda n: 1.0) == [0, 0]
    assert share_lengths([[], []], lambda n: 1.0) == [0, 0]


def test_the_budget_goes_to_who_is_surest() -> None:
    """Forwards that cost the same up to seven tokens and much more from eight on: five drafts, the five likeliest."""
    rows = [[0.9, 0.9, 0.9, 0.9], [0.6, 0.9, 0.9]]  # survivals .9 .81 .73 .66 and .6 .54 .49
    assert share_lengths(rows, lambda n: 1.0 if n <= 7 else 0.1) == [4, 1]
    assert share_lengths(rows, lambda n: 1.0) == [4, 3]


def best_in_retrospect(rows: list[list[float]], speed: Callable[[int], float]) -> list[int]:
    """For one request: the length of most tokens a second, looking at all confidences."""
    (row,) = rows
    survival, expected, rates = 1.0, 1.0, [speed(1)]
    for n, value in enumerate(row, start=1):
        survival *= value
        expected += survival
        rates.append(expected * speed(1 + n))
    return [max(range(len(rates)), key=rates.__getitem__)]


@pytest.mark.parametrize(("share", "wanted"), [(share_lengths, 0.70), (best_in_retrospect, 0.85)])
def test_stopping_early_keeps_the_distribution(
    share: Callable[[list[list[float]], Callable[[int], float]], list[int]], wanted: float
) -> None:
    """Two tokens, of which the target says A with 0.7 and the drafter with 0.5, counted out exactly.

    The second slot is sure only behind an A, and pays only as one of two. Who looks at it before deciding on the first
    verifies A and not B, and gets A with 0.5 + 0.5 * 0.7; who stops at the first slot, which does not pay, gets 0.7.
    """
    p, q = {"A": 0.7, "B": 0.3}, {"A": 0.5, "B": 0.5}
    speed = {1: 1.0, 2: 0.5, 3: 0.45}
    overlap = sum(min(p[token], q[token]) for token in p)
    says_a = 0.0
    for first, second in (("A", 0.95), ("B", 0.0)):
        (length,) = share([[overlap, second]], speed.__getitem__)
        if length == 0:
            says_a += q[first] * p["A"]
            continue
        accepted = min(1.0, p[first] / q[first])
        says_a += q[first] * (accepted * (first == "A") + (1 - accepted) * 1.0)  # what is left of p - q is all A
    assert says_a == pytest.approx(wanted)
