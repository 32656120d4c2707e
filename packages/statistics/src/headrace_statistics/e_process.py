"""E-process against the null hypothesis "the mean is at most `null`". It may be stopped at any time.

Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting" (JRSS-B 2023, arXiv 2010.09686),
section 4: before each x in [-1, 1] is observed, a gambler with one unit of money stakes λ ≥ 0 on "x is larger than
null". The wealth, their capital process,

    K_t = Π_{i ≤ t} (1 + λ_i (x_i - null)),

is a non-negative supermartingale as long as E[x_i | past] ≤ null, for every distribution. Hence P(sup_t K_t ≥ 1/α) ≤ α
(Ville's inequality, their section 2). The error bound needs nothing else: the choice of λ decides only how soon the
evidence suffices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_STAKE_MAX = 0.5
"""Largest share of the wealth that one value can cost: the truncation `c` of their bets."""


@dataclass(slots=True)
class EProcess:
    """Summary of the values so far, and the wealth (the e-process).

    `gap` is the effect to detect: stakes are optimal (Kelly) for a mean of `null + gap`, and larger when the data
    suggest a larger mean.
    """

    null: float
    gap: float
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean (Welford's recurrence)."""
    log_wealth: float = 0.0

    def stake(self) -> float:
        """Return λ for the next value, computed from the past alone.

        This is their "approximate GRAPA" bet, which maximises the expected growth of log K to second order: (mean -
        null) / (variance + (mean - null)²). The estimates begin with one imaginary value at the alternative, one unit
        of variance away. A standard error is subtracted from the estimated advantage, so that early luck is not bet on.
        """
        weight = self.count + 1
        variance = (1.0 + self.squares) / weight
        expected = (self.total + self.null + self.gap) / weight
        advantage = max(self.gap, expected - self.null - math.sqrt(variance / weight))
        best = advantage / (variance + advantage * advantage)
        return min(best, _STAKE_MAX / (1.0 + self.null)) if self.null > -1.0 else best

    def update(self, value: float) -> None:
        """Add one value of [-1, 1]."""
        self.log_wealth += math.log1p(self.stake() * (value - self.null))
        before = self.mean
        self.count += 1
        self.total += value
        self.squares += (value - before) * (value - self.total / self.count)

    def null_rejected(self, error: float) -> bool:
        """Return whether the null hypothesis is rejected. Over all time, the probability of a wrong rejection is at
        most `error`."""
        return self.log_wealth >= -math.log(error)

    @property
    def mean(self) -> float:
        """Mean of the values; 0 before the first value."""
        return self.total / self.count if self.count else 0.0

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean, or None for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else None
