"""What is kept of a stage: exact sums, percentiles within the stated error, and exact merging and subtracting."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.profiling.stats import HISTOGRAM_ERROR, NUM_BUCKETS, ProfileStats, bucket_of, merged, middle_of

SMALLEST, LARGEST = 1 << 10, (1 << 37) - 1
"""Nanoseconds between which percentiles keep their error: 1 us and 137 s."""

# as many of every order of magnitude
durations = st.floats(math.log(SMALLEST), math.log(LARGEST)).map(
    lambda x: min(max(round(math.exp(x)), SMALLEST), LARGEST)
)
any_durations = st.one_of(durations, st.integers(0, 1 << 45))


def stats_of(runs: list[int]) -> ProfileStats:
    stats = ProfileStats()
    for ns in runs:
        stats.add(ns)
    return stats


def exact_percentile(runs: list[int], share: float) -> int:
    """The smallest run that this share of the runs does not exceed."""
    ordered = sorted(runs)
    return next(ns for i, ns in enumerate(ordered, start=1) if i >= share * len(ordered))


@settings(deadline=None, max_examples=60)
@given(st.lists(durations, min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_percentiles_keep_the_stated_error(runs: list[int], share: float) -> None:
    """p50, p90 and p99 are within 6.25 % of the exact ones for runs from 1 us to 137 s, and not above the longest."""
    stats, exact = stats_of(runs), exact_percentile(runs, share)
    assert abs(stats.percentile(share) - exact) <= HISTOGRAM_ERROR * exact
    assert stats.percentile(share) <= stats.max_ns == max(runs)


@settings(deadline=None, max_examples=60)
@given(st.lists(any_durations, min_size=1, max_size=60))
def test_count_average_and_maximum_are_exact(runs: list[int]) -> None:
    """Whatever the runs, their number, mean and maximum are those of the runs themselves."""
    stats = stats_of(runs)
    assert (stats.count, stats.total_ns, stats.max_ns) == (len(runs), sum(runs), max(runs))
    assert stats.avg_ns == sum(runs) / len(runs)


@settings(deadline=None, max_examples=60)
@given(durations)
def test_a_bucket_holds_what_it_says(ns: int) -> None:
    """Every duration lies in the bucket whose middle is nearest in its octave, and buckets follow one another."""
    bucket = bucket_of(ns)
    assert 0 <= bucket < NUM_BUCKETS
    width = middle_of(bucket) - (1 << ns.bit_length() - 1)
    assert width > 0 and abs(ns - middle_of(bucket)) <= (1 << ns.bit_length() - 1) / 16
    assert bucket_of(ns - 1) in (bucket, bucket - 1) or bucket == 0


@pytest.mark.parametrize(("ns", "bucket"), [(0, 0), (999, 0), (SMALLEST, 0), (LARGEST, 215), (LARGEST + 1, 215)])
def test_durations_beyond_the_histogram_are_clamped(ns: int, bucket: int) -> None:
    """Shorter and longer runs count in the first and the last bucket; a percentile is then its middle at most."""
    assert bucket_of(ns) == bucket_of(1 << 60 if ns > LARGEST else ns) == bucket
    stats = stats_of([ns])
    assert stats.percentile(0.5) == min(middle_of(bucket), ns) and stats.total_ns == ns


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(any_durations, max_size=30), max_size=8))
def test_merged_parts_are_the_whole(parts: list[list[int]]) -> None:
    """Statistics of several threads together equal those of all their runs counted in one place, percentiles too."""
    whole = [ns for part in parts for ns in part]
    together = merged(stats_of(part) for part in parts)
    assert together == stats_of(whole)
    assert [together.percentile(p / 10) for p in range(11)] == [stats_of(whole).percentile(p / 10) for p in range(11)]


@settings(deadline=None, max_examples=60)
@given(st.lists(any_durations, max_size=30), st.lists(any_durations, max_size=30))
def test_an_interval_is_the_difference_of_two_readings(before: list[int], during: list[int]) -> None:
    """What was added after a reading is exactly what ran after it; only its longest run is not known."""
    earlier, later = stats_of(before), stats_of(before + during)
    part, alone = later.since(earlier), stats_of(during)
    assert part.max_ns is None and alone.max_ns is not None
    part.max_ns = alone.max_ns
    assert part == alone


def test_without_runs_everything_is_zero() -> None:
    """Averages and percentiles of nothing are 0, not an error."""
    assert ProfileStats().avg_ns == ProfileStats().percentile(0.99) == 0.0
    assert merged([]) == ProfileStats()


def test_an_unknown_maximum_stays_unknown() -> None:
    """Nothing is made up for the longest run of parts of which one does not know its own."""
    assert (stats_of([5]) + stats_of([7]).since(ProfileStats())).max_ns is None
