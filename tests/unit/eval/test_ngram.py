"""Copied drafts against a plain scan of the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.eval.ngram import NgramDrafter


def scanned(text: list[int], num_predicted: int) -> list[int]:
    """What followed the earliest occurrence of the longest suffix, 3 to 1 tokens, that the text has before."""
    for n in (3, 2, 1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + num_predicted]
    return []


def no_features() -> None:
    raise AssertionError("n-gram drafts need no features")


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=12), st.integers(1, 6))
def test_it_finds_what_a_scan_finds(pieces: list[list[int]], num_predicted: int) -> None:
    """Whatever comes in whatever pieces, each round proposes what a scan of the whole text would."""
    drafter, text = NgramDrafter(num_predicted), []
    for piece in pieces:
        drafter.extend(piece[:-1], no_features)
        text += piece
        assert drafter.propose(piece[-1]) == scanned(text, num_predicted)
        drafter.extend(piece[-1:], no_features)


def test_the_longest_suffix_counts_and_then_the_earliest() -> None:
    """Three tokens found late win over two found early; of equally long ones the first is copied."""
    drafter = NgramDrafter(2)
    drafter.extend([8, 2, 3, 70, 71, 1, 2, 3, 60, 61, 1, 2, 3, 50, 51, 1, 2], no_features)
    assert drafter.propose(3) == [60, 61]


def test_it_stops_where_the_text_ends() -> None:
    """Less than a whole draft is proposed where less has followed, and nothing after a new token."""
    drafter = NgramDrafter(4)
    drafter.extend([1, 2], no_features)
    assert drafter.propose(1) == [2, 1]
    assert drafter.propose(9) == []
