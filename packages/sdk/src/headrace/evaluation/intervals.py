"""Confidence intervals of a mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from headrace_schemas import student

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
    margin = student.mean_margin(values, 0.5 + confidence / 2)
    mean = statistics.fmean(values)
    return mean - margin, mean + margin


def wilson(successes: float, count: int, z: float = Z) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927): it holds for small counts, and for shares of 0 and 1."""
    share, squared = successes / count, z * z
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    half = z / (1 + squared / count) * math.sqrt(share * (1 - share) / count + squared / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
