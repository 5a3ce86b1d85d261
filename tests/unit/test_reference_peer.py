"""What `benchmarks.reference.peer` makes of runs of two trainers."""

from __future__ import annotations

import math

import pytest

from benchmarks.reference.peer import compare


def row(name: str, seed: int, equal: str, *counts: list[list[int]], peer: bool = False) -> dict:
    """A row of `benchmarks.recipes`; counts of the sets a, b, ..."""
    sets = {chr(ord("a") + i): each for i, each in enumerate(counts)}
    return {"name": name, "seed": seed, "equal": equal, "counts": sets} | ({"peer": name} if peer else {})


def test_prompts_are_pooled_seeds_averaged_and_sets_multiplied() -> None:
    """Of a set all committed tokens over all forwards; the mean of the seeds; the geometric mean of the sets."""
    rows = [
        row("other", 0, "steps", [[10, 10], [30, 10]], [[40, 10]], peer=True),  # 2 and 4
        row("other", 1, "steps", [[40, 10], [40, 10]], [[40, 10]], peer=True),  # 4 and 4
        row("ours", 0, "steps", [[40, 10], [40, 10]], [[90, 10]]),  # 4 and 9
        row("ours", 1, "steps", [[40, 10], [40, 10]], [[90, 10]]),
        row("ours", 1, "time", [[80, 10], [80, 10]], [[80, 10]]),  # of one seed alone: set beside that seed
    ]
    found = compare(rows)
    assert found["name"] == "other" and found["seeds"] == 2
    assert found["ours_equal_steps"] == pytest.approx(6.0)
    assert found["acceptance_length_equal_steps"] == pytest.approx(math.sqrt(3 * 4))
    assert found["ours_equal_time"] == pytest.approx(8.0)
    assert found["acceptance_length_equal_time"] == pytest.approx(4.0)
    assert found["ratio_equal_time"] == pytest.approx([2.0, 2.0])  # all prompts alike: nothing to draw
    low, high = found["ratio_equal_steps"]
    assert low < 6.0 / math.sqrt(12) < high


def test_prompts_are_drawn_for_both_alike() -> None:
    """A prompt that is easy for one is easy for the other: their ratio does not spread with which prompts are drawn."""
    easy_and_hard = [[10 * n, 10] for n in range(1, 9)]
    twice = [[2 * committed, rounds] for committed, rounds in easy_and_hard]
    found = compare([row("other", 0, "steps", easy_and_hard, peer=True), row("ours", 0, "steps", twice)])
    assert found["ratio_equal_steps"] == pytest.approx([2.0, 2.0])
    assert "ours_equal_time" not in found
