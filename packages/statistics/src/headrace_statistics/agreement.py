"""Agreement of raters: Cohen's kappa of two, Krippendorff's alpha of several, and bootstrap intervals over items.

Both coefficients are 1 - D_o / D_e: the mean difference of two answers about the same item, relative to the mean
difference that answers drawn at random would have. With `nominal` differences kappa is that of Cohen, "A coefficient of
agreement for nominal scales" (1960); with `squared` differences it is weighted kappa (Cohen 1968). Alpha is that of
Krippendorff, "Content Analysis" (2004, chapter 11), for any number of raters and missing answers.

Items with equal answers are counted together, so that a resample is a table of counts.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

Difference = Callable[[Any, Any], float]
"""Difference of two answers: 0 for equal ones."""
T = TypeVar("T", bound=Hashable)
SAMPLES = 500
_UNDEFINED_SHARE_MAX = 0.05


def nominal(first: object, second: object) -> float:
    """Return 0 for equal answers and 1 for different ones."""
    return float(first != second)


def squared(first: float, second: float) -> float:
    """Return the square of the difference of two numbers."""
    return (first - second) ** 2


def kappa(pairs: Mapping[tuple[Any, Any], int], difference: Difference = nominal) -> float | None:
    """Return Cohen's kappa of two raters, or None if both gave one and the same answer to all items.

    Args:
        pairs: number of items by the answers of the first and the second rater.
        difference: `nominal`, or `squared` for weighted kappa.
    """
    total = sum(pairs.values())
    firsts, seconds = Counter[Any](), Counter[Any]()
    for (first, second), count in pairs.items():
        firsts[first] += count
        seconds[second] += count
    observed = math.fsum(difference(*pair) * count for pair, count in pairs.items())
    expected = math.fsum(
        difference(first, second) * firsts[first] * seconds[second] for first in firsts for second in seconds
    )
    return 1.0 - observed * total / expected if expected else None


def alpha(units: Mapping[tuple[Any, ...], int], difference: Difference = nominal) -> float | None:
    """Return Krippendorff's alpha, or None if there are fewer than two different answers to compare.

    Args:
        units: number of items by their answers, in any order and without the missing ones. Items with fewer than two
            answers are ignored.
        difference: `nominal`, or `squared` for numbers ("interval" in Krippendorff's terms).
    """
    totals = Counter[Any]()
    observed = 0.0
    for answers, count in units.items():
        if len(answers) > 1 and count:
            observed += count * _mean_difference(answers, difference)
            for answer in answers:
                totals[answer] += count
    number = totals.total()
    expected = math.fsum(
        difference(first, second) * totals[first] * totals[second] for first in totals for second in totals
    )
    return 1.0 - observed * (number - 1) / expected if expected else None


@lru_cache(maxsize=4096)
def _mean_difference(answers: tuple[Any, ...], difference: Difference) -> float:
    """Return the sum of the differences of all ordered pairs of answers of one item, divided by their number less 1."""
    return math.fsum(difference(first, second) for first in answers for second in answers) / (len(answers) - 1)


def raw_agreement(pairs: Mapping[tuple[Any, Any], int]) -> float | None:
    """Return the share of items with equal answers of both raters, or None without items."""
    total = sum(pairs.values())
    return sum(count for (first, second), count in pairs.items() if first == second) / total if total else None


def bootstrap_interval(
    items: Iterable[T],
    statistic: Callable[[Mapping[T, int]], float | None],
    *,
    seed: int,
    samples: int = SAMPLES,
    confidence: float = 0.95,
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval of a statistic, with items drawn with replacement (Efron 1979).

    Args:
        items: the answers of each item.
        statistic: function of the number of items by their answers.
        seed: seed of the draws, so that a repeated call has the same result.
        samples: number of resamples.
        confidence: share of the resamples inside the interval.

    Returns:
        Both ends, or None if the statistic is undefined for more than one in twenty resamples.
    """
    population = list(items)
    if not population:
        return None
    draws = random.Random(seed)
    values = [statistic(Counter(draws.choices(population, k=len(population)))) for _ in range(samples)]
    defined = sorted(value for value in values if value is not None)
    if len(defined) < (1 - _UNDEFINED_SHARE_MAX) * samples:
        return None
    tail = (1.0 - confidence) / 2
    return _quantile(defined, tail), _quantile(defined, 1.0 - tail)


def _quantile(ordered: list[float], share: float) -> float:
    """Return the quantile of ordered values, interpolated between two neighbours (type 7 of Hyndman & Fan 1996)."""
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
