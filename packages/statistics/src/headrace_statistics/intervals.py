"""Confidence intervals of a mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from headrace_statistics import student_t

Z = 1.959963984540054
"""Quantile of the standard normal distribution for a two-sided interval of 95 %."""


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return the confidence interval of a mean, or None if there are too few values.

    For shares (all values are 0 or 1), it is Wilson's interval, which also holds if all values are equal. For other
    values, it is the mean plus and minus Student's t times the standard error, which needs two values.
    """
    if not values:
        return None
    z, count = statistics.NormalDist().inv_cdf(0.5 + confidence / 2), len(values)
    if all(value in (0.0, 1.0) for value in values):
        return wilson(math.fsum(values), count, z)
    if count < 2:
        return None
    margin = student_t.mean_margin(values, 0.5 + confidence / 2)
    mean = statistics.fmean(values)
    return mean - margin, mean + margin


def wilson(successes: float, count: int, z: float = Z) -> tuple[float, float]:
    """Return the score interval of a share (Wilson 1927), which also holds for small counts and for shares of 0 and
    1."""
    share, squared = successes / count, z * z
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    half = z / (1 + squared / count) * math.sqrt(share * (1 - share) / count + squared / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
