"""Calibrate a cheap score against explicit feedback by isotonic regression, with an interval.

R. Barlow et al., Statistical Inference under Order Restrictions (1972): pool adjacent violators. The interval is that
of E. B. Wilson (1927) for the pooled values. For values strictly between 0 and 1 it is too wide rather than too narrow.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Expected value of people's feedback, with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Block:
    """Pooled pairs with scores from `score` on: their count, and the sum of the feedback values."""

    score: float
    count: int
    total: float

    @property
    def mean(self) -> float:
        return self.total / self.count


class Calibration:
    """Calibration learned from pairs of a score and a feedback value about the same run, both from 0 to 1.

    A higher score never has a lower calibrated value. `calibrated` abstains if fewer than `count_min` feedback values
    are pooled or the interval is wider than `width_max`.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[float, float]],
        *,
        count_min: int = 10,
        width_max: float = 0.5,
        confidence: float = 0.9,
    ) -> None:
        self._blocks = _pooled(sorted(pairs))
        self._scores = [block.score for block in self._blocks]
        self._count_min = count_min
        self._width_max = width_max
        self._deviations = NormalDist().inv_cdf(0.5 + confidence / 2)

    def calibrated(self, score: float) -> Calibrated | None:
        """Return the calibrated value of a score, or None if the data are not sufficient."""
        if not self._blocks:
            return None
        block = self._blocks[max(0, bisect_right(self._scores, score) - 1)]
        low, high = _wilson(block.total, block.count, self._deviations)
        if block.count < self._count_min or high - low > self._width_max:
            return None
        return Calibrated(block.mean, low, high)


def _wilson(successes: float, count: int, z: float) -> tuple[float, float]:
    """Return Wilson's score interval, as `headrace_statistics.intervals.wilson` does; the client imports no
    statistics."""
    share, squared = successes / count, z * z
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    half = z / (1 + squared / count) * math.sqrt(share * (1 - share) / count + squared / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def _pooled(pairs: Iterable[tuple[float, float]]) -> list[_Block]:
    """Return blocks with rising means. `pairs` must be sorted by score.

    Raises:
        ValueError: a score or a value is not from 0 to 1.
    """
    blocks: list[_Block] = []
    for score, equal in groupby(pairs, key=itemgetter(0)):
        values = [value for _, value in equal]
        if not all(0 <= number <= 1 for number in (score, *values)):
            raise ValueError(f"score {score:g} with values {values}: scores and values must be from 0 to 1")
        new = _Block(score, len(values), math.fsum(values))
        while blocks and blocks[-1].mean >= new.mean:
            before = blocks.pop()
            new = _Block(before.score, before.count + new.count, before.total + new.total)
        blocks.append(new)
    return blocks
