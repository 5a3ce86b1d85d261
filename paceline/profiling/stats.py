"""What is kept of a stage: exact counts and sums, and a histogram that merges and subtracts exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NUM_BUCKETS = 216
"""Eight for every doubling from 1 us (2**10 ns) to 137 s (2**37 ns)."""

HISTOGRAM_ERROR = 1 / 16
"""Largest relative error of a percentile between 1 us and 137 s: a bucket's middle against its edges."""

_FIRST_EXPONENT = 11
"""Bits of 1,024 ns."""


def bucket_of(ns: int) -> int:
    """Histogram bucket of a duration."""
    exponent = ns.bit_length()
    if exponent < _FIRST_EXPONENT:
        return 0
    bucket = (exponent - _FIRST_EXPONENT) * 8 + (ns >> (exponent - 4) & 7)
    return bucket if bucket < NUM_BUCKETS else NUM_BUCKETS - 1


def middle_of(bucket: int) -> float:
    """Nanoseconds in the middle of a bucket."""
    octave, eighth = divmod(bucket, 8)
    return float((1 << octave + _FIRST_EXPONENT - 1) * (1 + (eighth + 0.5) / 8))


@dataclass
class ProfileStats:
    """One stage over some time.

    Attributes:
        count: Times that it ended.
        total_ns: Time in it; `self_ns` without the stages inside it.
        max_ns: Longest; None where it is not known.
        errors: How many ended by an exception.
        recompute_count, recompute_ns: Runs inside a backward pass that computes a layer again, not in `count`.
        device_count, device_ns: Runs whose time on the device was measured, and that time.
        lag_count, lag_ns, drained: Runs whose run-ahead lag was measured, its sum (from when the host had launched the
            stage to when the device had finished it), and runs that found the device without work.
        outermost: Runs that were in no other stage.
        histogram: Runs a bucket, `NUM_BUCKETS`.
    """

    count: int = 0
    total_ns: int = 0
    self_ns: int = 0
    max_ns: int | None = 0
    errors: int = 0
    recompute_count: int = 0
    recompute_ns: int = 0
    device_count: int = 0
    device_ns: int = 0
    lag_count: int = 0
    lag_ns: int = 0
    drained: int = 0
    outermost: int = 0
    histogram: Sequence[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)

    def add(self, ns: int, self_ns: int | None = None) -> None:
        """Count one run of `ns` nanoseconds."""
        self.count += 1
        self.total_ns += ns
        self.self_ns += ns if self_ns is None else self_ns
        self.max_ns = max(self.max_ns or 0, ns)
        histogram = list(self.histogram)
        histogram[bucket_of(ns)] += 1
        self.histogram = histogram

    def percentile(self, share: float) -> float:
        """Nanoseconds that this share of the runs (0 to 1) took at most, within `HISTOGRAM_ERROR`; 0 without runs.

        Never above `max_ns`.
        """
        wanted, seen = share * sum(self.histogram), 0
        for bucket, count in enumerate(self.histogram):
            seen += count
            if count and seen >= wanted:
                middle = middle_of(bucket)
                return middle if self.max_ns is None else min(middle, float(self.max_ns))
        return 0.0

    @property
    def avg_ns(self) -> float:
        """Mean of the runs; 0 without any."""
        return self.total_ns / self.count if self.count else 0.0

    def since(self, earlier: ProfileStats) -> ProfileStats:
        """What was added after `earlier`, of the same stage; the longest run of that time is not known."""
        return _combine(self, earlier, -1, None)

    def __add__(self, other: ProfileStats) -> ProfileStats:
        """Both together, as if they had been one."""
        longest = None if self.max_ns is None or other.max_ns is None else max(self.max_ns, other.max_ns)
        return _combine(self, other, 1, longest)


_SUMS = ("count", "total_ns", "self_ns", "errors", "recompute_count", "recompute_ns", "device_count", "device_ns",
         "lag_count", "lag_ns", "drained", "outermost")  # fmt: skip


def _combine(a: ProfileStats, b: ProfileStats, sign: int, max_ns: int | None) -> ProfileStats:
    sums = {name: getattr(a, name) + sign * getattr(b, name) for name in _SUMS}
    histogram = [x + sign * y for x, y in zip(a.histogram, b.histogram, strict=True)]
    return ProfileStats(max_ns=max_ns, histogram=histogram, **sums)


def merged(parts: Iterable[ProfileStats]) -> ProfileStats:
    """All of them together."""
    return sum(parts, ProfileStats())
