"""What is measured before a demo, and what is chosen from it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.dflash.acceptance import Acceptance, walk
from paceline.eval import calibrate
from paceline.eval.decode import CachedTarget
from tests import tiny


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [
        ({1: 100.0}, 1),  # one core
        ({1: 100.0, 2: 60.0}, 2),
        ({1: 100.0, 2: 95.0}, 1),  # not worth a core
        ({1: 100.0, 2: 450.0}, 1),  # a core taken by other work: both threads wait for the slower one
        ({1: 100.0, 2: 60.0, 4: 58.0, 8: 90.0}, 2),
        ({1: 100.0, 2: 98.0, 4: 70.0}, 4),  # the step between was a bad moment
    ],
)
def test_threads_have_to_pay(milliseconds: dict[int, float], chosen: int) -> None:
    """More threads only where they are clearly faster; counting cores would choose the largest number."""
    assert calibrate.choose_threads(milliseconds) == chosen


@pytest.mark.parametrize(
    ("cores", "candidates"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_candidates_are_few(cores: int, candidates: list[int]) -> None:
    """Powers of two and all cores."""
    assert calibrate.thread_candidates(cores) == candidates


def test_threads_are_timed_in_turns_and_put_back() -> None:
    """Every number is set while it is timed, the mean is taken without the first turn, and all is as before."""
    seen, before = [], torch.get_num_threads()

    def work() -> None:
        seen.append(torch.get_num_threads())
        time.sleep(0.5 if len(seen) <= 2 else 0.004 * seen[-1])

    times = calibrate.time_threads(work, [1, 2], repeats=3)
    assert seen == [1, 2] * 4 and torch.get_num_threads() == before
    assert 4 <= times[1] < times[2] < 400


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_expected_lengths_are_sums_of_products(shares: list[float]) -> None:
    """1 + a1 + a1 a2 + ...: what a block of k slots commits if each slot is accepted as in the whole block."""
    lengths = calibrate.expected_lengths(shares)
    assert list(lengths) == list(range(2, len(shares) + 2))
    for k, length in lengths.items():
        expected = 1.0
        for slots in range(1, k):
            product = 1.0
            for share in shares[:slots]:
                product *= share
            expected += product
        assert length == pytest.approx(expected)


def test_expected_length_is_what_decoding_gives() -> None:
    """Over many rounds that are not cut short, the formula gives the pooled acceptance length of a smaller block."""
    leading = torch.randint(0, 5, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    whole, cut = walk(leading, 4), Acceptance(2)
    cut += walk([min(hits, 2) for hits in leading], 2)
    assert calibrate.expected_lengths(whole.per_position)[3] == pytest.approx(cut.length, rel=0.03)


def test_the_block_is_what_pays_on_this_machine() -> None:
    """The same acceptance asks for large blocks where verifying is cheap, and for small ones where it is not."""
    shares = [0.6, 0.7, 0.8, 0.8, 0.8, 0.6, 0.5]
    cheap = calibrate.expected_speedups(shares, {k: 30.0 + 0.1 * k for k in range(1, 17)}, 2.0)
    dear = calibrate.expected_speedups(shares, {k: 10.0 * k for k in range(1, 17)}, 2.0)
    assert max(cheap, key=cheap.__getitem__) == 8 and cheap[8] > 2.5
    assert max(dear, key=dear.__getitem__) == 2 and dear[2] < 1.0
    assert cheap[2] == pytest.approx(1.6 * 30.1 / (30.2 + 2.0))


@pytest.mark.parametrize(
    ("ratios", "block"),
    [
        ({k: 1.0 for k in range(1, 17)}, 7),  # verifying is free, and an eighth slot is hardly ever reached
        ({k: 1.0 if k <= 6 else 1.2 for k in range(1, 17)}, 6),  # an EPYC with packed weights
        ({k: 0.6 + 0.4 * k for k in range(1, 17)}, 4),  # every token costs
    ],
)
def test_the_trained_block_follows_the_cost_of_verifying(ratios: dict[int, float], block: int) -> None:
    """As many slots as are nearly free to verify, and never fewer than four."""
    assert calibrate.choose_trained_block({k: 33.0 * ratio for k, ratio in ratios.items()}, 4.0) == block


def test_a_target_is_timed_and_left_usable(tmp_path: Path) -> None:
    """All verifications of 1 to 16 tokens, the prompt and the draft take time; the target decodes as before."""
    target = CachedTarget.load(tiny.save(tiny.causal_lm("llama"), tmp_path / "t"), (1, 3))
    first = target.prefill([5, 6, 7])
    costs = calibrate.time_verification(target)
    assert list(costs) == list(range(1, 17)) and min(costs.values()) > 0
    assert calibrate.time_prefill(target) > 0
    assert calibrate.time_drafting(target, tiny.drafter(), 4) > 0
    calibrate.decoding_work(target)()
    assert target.prefill([5, 6, 7]) == first


@pytest.mark.parametrize(
    ("trained", "smallest", "sizes"),
    [
        (2, 2, [2]),
        (4, 2, [2, 3, 4]),
        (4, 1, [1, 2, 3, 4]),
        (8, 2, [2, 3, 4, 5, 7, 8]),
        (16, 2, [2, 3, 4, 5, 7, 9, 12, 16]),
    ],
)
def test_swept_blocks_are_few_and_end_with_the_trained_one(trained: int, smallest: int, sizes: list[int]) -> None:
    """Small sizes one by one, larger ones in steps of a third."""
    assert calibrate.swept_blocks(trained, smallest) == sizes


def test_the_shortest_of_equals_is_served() -> None:
    """A block that is 2 % slower than a longer one is taken before it, one that is 4 % slower is not."""
    assert calibrate.fewest_nearly_best({8: 100.0, 4: 98.0, 2: 90.0}) == 4
    assert calibrate.fewest_nearly_best({2: 96.0, 8: 100.0}) == 8
