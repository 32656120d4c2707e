"""Confidence intervals of a mean, of the standard library alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Z = 1.959963984540054
"""Of a normal distribution, 2.5 % lie beyond it on each side."""


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Of shares (all values 0 or 1) that of Wilson, also for none and all; of others the mean plus and minus Student's
    t times its standard error, None for fewer than two of them."""
    if not values:
        return None
    z, count = statistics.NormalDist().inv_cdf(0.5 + confidence / 2), len(values)
    if all(value in (0.0, 1.0) for value in values):
        return wilson(math.fsum(values), count, z)
    if count < 2:
        return None
    reach = student(z, count - 1) * statistics.stdev(values) / math.sqrt(count)
    mean = statistics.fmean(values)
    return mean - reach, mean + reach


def student(z: float, freedom: int) -> float:
    """Student's quantile from the normal one: exact for 1 and 2 degrees of freedom, else by Cornish and Fisher's
    expansion (Abramowitz and Stegun 26.7.5), which is within 1 % from 3 on for 95 %."""
    share = statistics.NormalDist().cdf(z)
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) / math.sqrt(2 * share * (1 - share))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def wilson(successes: float, count: int, z: float = Z) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927): it holds for small counts, and for shares of 0 and 1."""
    share, squared = successes / count, z * z
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    half = z / (1 + squared / count) * math.sqrt(share * (1 - share) / count + squared / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
