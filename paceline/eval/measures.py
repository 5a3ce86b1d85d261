"""What is read off decoded answers beside acceptance and speed: spread, and how both change with the context."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from paceline.eval.decode import Decoded, Round

CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Lower ends of the buckets by tokens of context; the last one has no upper end."""

INTERVAL_RULE = (
    "95 % over prompts: linearised ratio of committed tokens to rounds, Student's t with one degree of freedom fewer "
    "than prompts"
)

CONFIDENCE = 0.95
MIN_PROMPTS = 3
"""Prompts with a round below which no interval is given: with fewer it would be wider than what it is about."""


@dataclass(frozen=True)
class Estimate:
    """How well an acceptance length is known, if the prompts are a sample of more of their kind.

    Attributes:
        error: Standard error.
        low, high: The interval, see `INTERVAL_RULE`.
    """

    error: float
    low: float
    high: float


def acceptance_estimate(answers: Sequence[Decoded]) -> Estimate | None:
    """Spread of the pooled acceptance length over prompts; None with fewer than `MIN_PROMPTS` that had a round.

    With c_i tokens committed and r_i rounds in answer i, R = sum c / sum r, and
    error^2 = n / (n - 1) * sum (c_i - R r_i)^2 / (sum r)^2. Rounds of one answer resemble each other, so prompts are
    what is counted. Source: the ratio estimator of survey sampling (W. Cochran, Sampling Techniques, section 6.4).
    """
    return _ratio_estimate(
        [(answer.acceptance.committed, answer.acceptance.rounds) for answer in answers if answer.acceptance.rounds]
    )


def _ratio_estimate(counts: Sequence[tuple[int, int]]) -> Estimate | None:
    """Of committed tokens over rounds, a pair for each prompt that had a round."""
    if len(counts) < MIN_PROMPTS:
        return None
    rounds = sum(r for _, r in counts)
    ratio = sum(c for c, _ in counts) / rounds
    scatter = sum((c - ratio * r) ** 2 for c, r in counts)
    error = math.sqrt(len(counts) / (len(counts) - 1) * scatter) / rounds
    margin = student_quantile(0.5 + CONFIDENCE / 2, len(counts) - 1) * error
    return Estimate(error, max(1.0, ratio - margin), ratio + margin)


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t by the normal one's expansion; within 1 % of it from 2 degrees of freedom on.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def accepted_counts(answers: Sequence[Decoded], num_predicted: int) -> list[int]:
    """Rounds by drafted tokens accepted, 0 to `num_predicted`; those that a stop or the limit cut count as they are."""
    counts = [0] * (num_predicted + 1)
    for answer in answers:
        for num_accepted in answer.num_accepted_tokens:
            counts[num_accepted] += 1
    return counts


@dataclass(frozen=True)
class Bucket:
    """Rounds whose anchor has `start` to `end` - 1 tokens before it, those of the prompt included.

    Attributes:
        end: None in the last bucket.
        prompts: With a drafted round among them.
        acceptance_length: Of the drafted rounds.
        estimate: How well that is known; None with too few prompts.
        tok_per_s, baseline_tok_per_s: Drafted and plain, prefill left out; None where nothing plain was decoded.
    """

    start: int
    end: int | None
    rounds: int
    prompts: int
    acceptance_length: float
    estimate: Estimate | None
    tok_per_s: float
    baseline_tok_per_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the interval in place of the estimate, and the speedup."""
        speedup = self.tok_per_s / self.baseline_tok_per_s if self.baseline_tok_per_s else None
        values = {name: value for name, value in vars(self).items() if name != "estimate"}
        interval = [self.estimate.low, self.estimate.high] if self.estimate else None
        return values | {"acceptance_length_interval": interval, "speedup": speedup}


def context_buckets(plain: Sequence[Decoded], speculative: Sequence[Decoded]) -> list[Bucket]:
    """Acceptance length and speed by length of context, for the buckets that a drafted round fell into."""
    drafted, single = _by_bucket(speculative), _by_bucket(plain)
    buckets = []
    for place in sorted(drafted):
        by_prompt, ends = drafted[place], [*CONTEXT_EDGES[1:], None]
        counts = [(sum(each.num_committed for each in rounds), len(rounds)) for rounds in by_prompt]
        num_rounds = sum(number for _, number in counts)
        bucket = Bucket(
            start=CONTEXT_EDGES[place],
            end=ends[place],
            rounds=num_rounds,
            prompts=len(counts),
            acceptance_length=sum(committed for committed, _ in counts) / num_rounds,
            estimate=_ratio_estimate(counts),
            tok_per_s=_tok_per_s(list(itertools.chain(*by_prompt))),
            baseline_tok_per_s=_tok_per_s(list(itertools.chain(*single[place]))) if place in single else None,
        )
        buckets.append(bucket)
    return buckets


def _by_bucket(answers: Sequence[Decoded]) -> dict[int, list[list[Round]]]:
    """Rounds by bucket, those of each answer together."""
    found: dict[int, list[list[Round]]] = {}
    for answer in answers:
        own: dict[int, list[Round]] = {}
        for one in answer.rounds():
            own.setdefault(bisect.bisect_right(CONTEXT_EDGES, one.num_context) - 1, []).append(one)
        for place, rounds in own.items():
            found.setdefault(place, []).append(rounds)
    return found


def _tok_per_s(rounds: Sequence[Round]) -> float:
    seconds = sum(one.seconds for one in rounds)
    return sum(one.num_committed for one in rounds) / seconds if seconds else 0.0


def first_token_s(answers: Sequence[Decoded]) -> dict[str, float]:
    """Seconds from a prompt to its first token: median and longest; zeros without an answer."""
    seconds = [answer.prefill_s for answer in answers] or [0.0]
    return {"median": statistics.median(seconds), "longest": max(seconds)}
