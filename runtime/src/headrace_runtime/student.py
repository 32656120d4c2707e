"""Quantiles of Student's t distribution, without a numerics library.

The expansion of Abramowitz & Stegun, "Handbook of Mathematical Functions", 26.7.5, around the normal quantile x:

    t = x + g1/ν + g2/ν² + g3/ν³ + g4/ν⁴,
    g1 = (x³ + x)/4,                        g2 = (5x⁵ + 16x³ + 3x)/96,
    g3 = (3x⁷ + 19x⁵ + 17x³ - 15x)/384,     g4 = (79x⁹ + 776x⁷ + 1482x⁵ - 1920x³ - 945x)/92160.

For 8 degrees of freedom or more and probabilities up to 0.975 it is right to three digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev


def quantile(probability: float, freedom: float) -> float:
    """Where the distribution function is `probability`."""
    x = NormalDist().inv_cdf(probability)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, 1))


def low(values: Sequence[float], level: float) -> float:
    """Where the mean of independent values lies at least, but for a probability of `level`. Minus infinity for less
    than two."""
    return fmean(values) - reach(values, 1 - level) if values else -math.inf


def reach(values: Sequence[float], probability: float) -> float:
    """How far the mean of independent values is from theirs at most on one side, with `probability`. Infinite for less
    than two."""
    count = len(values)
    if count < 2:
        return math.inf
    return quantile(probability, count - 1) * stdev(values) / math.sqrt(count)
