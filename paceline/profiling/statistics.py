"""Intervals and tests for what is sampled: shares of samples, means of sub-windows, many comparisons at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z_95 = 1.959964


def wilson(hits: float, samples: float) -> tuple[float, float]:
    """95 % interval of a share of independent samples: never outside of 0 to 1, and sound near both ends.

    Source: Wilson, 1927. Without samples it is all of 0 to 1.
    """
    if samples <= 0:
        return 0.0, 1.0
    share, z2 = min(max(hits / samples, 0.0), 1.0), Z_95**2
    middle = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = Z_95 * math.sqrt(share * (1 - share) / samples + z2 / (4 * samples**2)) / (1 + z2 / samples)
    return (0.0 if share == 0.0 else max(0.0, middle - half)), (1.0 if share == 1.0 else min(1.0, middle + half))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval from sub-windows (Student's t); without width for fewer than two."""
    n = len(values)
    if n == 0:
        raise ValueError("no values")
    mean = math.fsum(values) / n
    if n == 1:
        return mean, mean, mean
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = t_95(n - 1) * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def t_95(freedom: int) -> float:
    """Student's t, two-sided 95 %, by degrees of freedom; within 0.2 % above 3 (Cornish-Fisher)."""
    exact = {1: 12.706, 2: 4.303, 3: 3.182}
    if freedom in exact:
        return exact[freedom]
    z, n = Z_95, float(freedom)
    z3, z5, z7 = z**3, z**5, z**7
    return (
        z
        + (z3 + z) / (4 * n)
        + (5 * z5 + 16 * z3 + 3 * z) / (96 * n**2)
        + (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * n**3)
    )


def two_proportions(hits_a: float, samples_a: float, hits_b: float, samples_b: float) -> float:
    """p-value, two-sided, that two shares of samples are the same (pooled z); 1 without samples on a side."""
    if samples_a <= 0 or samples_b <= 0:
        return 1.0
    pooled = (hits_a + hits_b) / (samples_a + samples_b)
    variance = pooled * (1 - pooled) * (1 / samples_a + 1 / samples_b)
    if variance <= 0:
        return 1.0
    return math.erfc(abs(hits_a / samples_a - hits_b / samples_b) / math.sqrt(2 * variance))


def false_discoveries(p_values: Sequence[float], rate: float = 0.05) -> list[bool]:
    """Which of many tests stand when at most `rate` of those that do may be false (Benjamini and Hochberg, 1995)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    last = -1
    for rank, i in enumerate(order, start=1):
        if p_values[i] <= rate * rank / len(p_values):
            last = rank
    stands = [False] * len(p_values)
    for i in order[: max(0, last)]:
        stands[i] = True
    return stands
