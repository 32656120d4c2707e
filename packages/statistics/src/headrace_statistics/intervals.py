"""Confidence intervals of a mean, for one time and for all times.

`ConfidenceSequence`: intervals for all times that contain the mean at all of them together with probability 1 - α.

The hedged capital confidence sequence of Waudby-Smith & Ramdas, "Estimating means of bounded random variables by
betting" (JRSS-B 2023, arXiv 2010.09686), Theorem 3 with θ = 1/2 and c = 1/2, for values z in [0, 1]:

    K⁺_t(m) = Π (1 + min(λ_i, c/m) (z_i - m)),    K⁻_t(m) = Π (1 - min(λ_i, c/(1-m)) (z_i - m)),
    {m : max(K⁺_t(m), K⁻_t(m)) / 2 < 1/α},
    λ_t = √(2 ln(2/α) / (σ̂²_{t-1} t ln(1+t))),  μ̂_t = (1/2 + Σ z_i)/(t+1),  σ̂²_t = (1/4 + Σ (z_i - μ̂_i)²)/(t+1).

K⁺ falls and K⁻ rises with m, so the set is an interval, and bisection finds its ends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_statistics import student_t

_TRUNCATION = 0.5
_HALVINGS = 30


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval. Bisection makes it wider than the theorem's, never narrower."""

    lower: float
    upper: float


@dataclass(slots=True)
class ConfidenceSequence:
    """Confidence sequence of the mean of values in [0, 1]: the values so far with the bets on them.

    `alpha` is the error probability of both ends and all times together.
    """

    alpha: float
    _values: list[tuple[float, float]] = field(default_factory=list)
    """Pairs of z and λ."""
    _total: float = 0.5
    _squares: float = 0.25

    def update(self, value: float) -> None:
        """Add one value of [0, 1]."""
        time = len(self._values) + 1
        variance = self._squares / time
        bet = math.sqrt(2.0 * math.log(2.0 / self.alpha) / (variance * time * math.log1p(time)))
        self._values.append((value, bet))
        self._total += value
        self._squares += (value - self._total / (time + 1)) ** 2

    def interval(self) -> Interval:
        """Return the confidence interval after the values observed so far."""
        limit = math.log(2.0 / self.alpha)
        lower = _crossing(lambda mean: self._from_below(mean) < limit)
        upper = 1.0 - _crossing(lambda rest: self._from_above(1.0 - rest) < limit)
        return Interval(lower, upper)

    def _from_below(self, mean: float) -> float:
        """Return ln K⁺(`mean`), which is large if the values are above `mean`."""
        most = _TRUNCATION / mean if mean > 0.0 else math.inf
        return math.fsum(math.log1p(min(bet, most) * (value - mean)) for value, bet in self._values)

    def _from_above(self, mean: float) -> float:
        """Return ln K⁻(`mean`), which is large if the values are below `mean`."""
        most = _TRUNCATION / (1.0 - mean) if mean < 1.0 else math.inf
        return math.fsum(math.log1p(-min(bet, most) * (value - mean)) for value, bet in self._values)


def _crossing(inside: Callable[[float], bool]) -> float:
    """Return the largest number that is certainly outside, left of all that are inside; 0 when all may be inside."""
    if inside(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if inside(middle) else (middle, high)
    return low


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
