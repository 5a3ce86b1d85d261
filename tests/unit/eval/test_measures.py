"""Spread over prompts, histograms and buckets by context, against plain counting."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.dflash.acceptance import Acceptance
from paceline.eval.decode import Decoded, Round
from paceline.eval.measures import (
    Estimate,
    acceptance_estimate,
    accepted_counts,
    context_buckets,
    first_token_s,
    student_quantile,
)


def answer(num_accepted: list[int], num_prompt: int = 0, seconds: float = 1.0, cut: int = 0) -> Decoded:
    """An answer of some rounds; `cut` tokens are missing at its end."""
    num_tokens = 1 + sum(num_accepted) + len(num_accepted) - cut
    acceptance = Acceptance(3)
    for place, n in enumerate(num_accepted):
        acceptance.add_round(n, n + 1 - (cut if place == len(num_accepted) - 1 else 0))
    times = [seconds] * len(num_accepted)
    return Decoded([7] * num_tokens, acceptance, num_accepted, prefill_s=0.5, rounds_s=times, num_prompt=num_prompt)


def plain(num_rounds: int, num_prompt: int = 0, seconds: float = 1.0) -> Decoded:
    return Decoded(
        [7] * (num_rounds + 1), Acceptance(0), prefill_s=0.25, rounds_s=[seconds] * num_rounds, num_prompt=num_prompt
    )


@pytest.mark.parametrize(
    ("freedom", "wanted"), [(2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (23, 2.0687), (10**6, 1.95996)]
)
def test_students_quantile(freedom: int, wanted: float) -> None:
    """The expansion gives the 97.5 % point of published tables within 1 %."""
    assert student_quantile(0.975, freedom) == pytest.approx(wanted, rel=0.01)


def test_the_interval_of_hand_counted_prompts() -> None:
    """Committed tokens over rounds of three prompts, with the error worked out by hand; it never goes below 1."""
    answers = [answer([3, 3]), answer([1, 1, 1]), answer([0])]  # 8 / 2, 6 / 3, 1 / 1: 15 / 6 = 2.5
    scatter = (8 - 5) ** 2 + (6 - 7.5) ** 2 + (1 - 2.5) ** 2
    error = math.sqrt(3 / 2 * scatter) / 6
    estimate = acceptance_estimate(answers)
    assert estimate is not None and estimate.error == pytest.approx(error)
    assert estimate.high == pytest.approx(2.5 + 4.3027 * error, rel=0.01)
    assert estimate.low == 1.0  # 2.5 - 4.3 * error is below what a round commits at least


def test_few_prompts_have_no_interval() -> None:
    """Two prompts say nothing about their spread, nor do prompts that ended before a round."""
    assert acceptance_estimate([answer([1]), answer([2]), answer([])]) is None
    assert acceptance_estimate([answer([1])] * 3) == Estimate(0.0, 2.0, 2.0)


def test_the_interval_holds_what_it_says() -> None:
    """Of many sets of 24 prompts with easy and hard ones, some 95 % have the true length inside their interval."""
    generator = np.random.default_rng(0)

    def sample(num_prompts: int) -> list[Decoded]:
        ease = generator.beta(2, 3, num_prompts)
        return [answer(generator.binomial(3, p, generator.integers(4, 30)).tolist()) for p in ease]

    truth, inside = 1 + 3 * 2 / 5, 0  # rounds do not hang on the ease here
    for _ in range(400):
        estimate = acceptance_estimate(sample(24))
        assert estimate is not None
        inside += estimate.low <= truth <= estimate.high
    assert 0.91 < inside / 400 < 0.98


def test_rounds_are_counted_by_accepted_drafts() -> None:
    """Every round counts once, those without a hit and those cut short as well."""
    assert accepted_counts([answer([3, 0, 1]), answer([0, 3], cut=1), answer([])], 3) == [2, 1, 0, 2]


def test_rounds_know_their_context() -> None:
    """The context of a round is the prompt and all tokens before its anchor; a cut round committed fewer."""
    assert answer([2, 0, 3], num_prompt=10, cut=1).rounds() == [Round(10, 3, 1.0), Round(13, 1, 1.0), Round(14, 3, 1.0)]
    assert plain(2, num_prompt=5, seconds=0.5).rounds() == [Round(5, 1, 0.5), Round(6, 1, 0.5)]
    assert answer([]).rounds() == []


def test_buckets_split_rounds_by_context() -> None:
    """Rounds go where their context lies, and plain tokens beside them; rates leave the prefill out."""
    drafted = [answer([1, 1, 3], num_prompt=125, seconds=0.5), answer([0], num_prompt=500)]
    buckets = context_buckets([plain(4, num_prompt=126, seconds=2.0)], drafted)
    assert [(b.start, b.end, b.rounds) for b in buckets] == [(0, 128, 2), (128, 256, 1), (256, 512, 1)]
    assert [b.acceptance_length for b in buckets] == [2.0, 4.0, 1.0]
    assert [b.tok_per_s for b in buckets] == [4.0, 8.0, 1.0]
    assert [b.baseline_tok_per_s for b in buckets] == [0.5, 0.5, None]
    assert [b.as_dict()["speedup"] for b in buckets] == [8.0, 16.0, None]
    assert context_buckets([], [answer([0], num_prompt=200_000)])[0].end is None
    assert [b.start for b in context_buckets([], [answer([0], num_prompt=n) for n in (127, 128)])] == [0, 128]


def test_a_bucket_has_the_interval_of_its_own_rounds() -> None:
    """What an evaluation of these rounds alone would say, prompt by prompt; without enough prompts there is none."""
    short = [[1, 2], [0, 3, 1], [2]]
    answers = [answer(counts, num_prompt=100) for counts in short]
    answers += [answer([3, 0], num_prompt=70_000), answer([1], num_prompt=70_000)]
    near, far = context_buckets([], answers)
    wanted = acceptance_estimate(answers[:3])
    assert near.estimate == wanted and wanted is not None and near.prompts == 3 and near.rounds == 6
    assert near.as_dict()["acceptance_length_interval"] == [wanted.low, wanted.high]
    assert (far.start, far.end, far.prompts, far.rounds, far.estimate) == (65_536, 131_072, 2, 3, None)
    assert far.as_dict()["acceptance_length_interval"] is None


def test_an_answer_that_grows_into_a_bucket_counts_there() -> None:
    """With the rounds that it had there: one prompt in two buckets."""
    buckets = context_buckets([], [answer([1, 1, 3], num_prompt=1020), answer([2], num_prompt=1030)])
    assert [(b.start, b.prompts, b.rounds) for b in buckets] == [(512, 1, 2), (1024, 2, 2)]


def test_the_first_token_is_there_after_the_prompt() -> None:
    """Its time is the prefill's, in the median and at most."""
    answers = [Decoded([1], Acceptance(0), prefill_s=seconds) for seconds in (1.0, 5.0, 2.0)]
    assert first_token_s(answers) == {"median": 2.0, "longest": 5.0}
    assert first_token_s([]) == {"median": 0.0, "longest": 0.0}
