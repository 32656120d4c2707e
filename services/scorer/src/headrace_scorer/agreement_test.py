"""Sequential test of whether a judge agrees with people less than at first, with a bounded false alarm rate.

Each run that both have scored gives a disagreement from 0 to 1. The first runs are the reference. They give an upper
confidence bound of the mean disagreement, at half of the allowed error (W. Hoeffding, JASA 58 (1963) 13, theorem 1, in
the form of a relative entropy). Every later run is a bet against the hypothesis that the mean is at most that bound
(I. Waudby-Smith and A. Ramdas, JRSS B 86 (2024) 1). A bet may begin at any run: the starts are mixed with the weights
1/(n(n+1)), so that a long time without drift does not delay the alarm. The total capital of the bets is an e-process.
By Ville's inequality it reaches 1/error with a probability of at most that error, however long the test runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

_STAKES = (0.1, 0.3, 0.6, 0.9)
"""Stakes as shares of the largest possible stake. The test uses the mean capital of these strategies."""
_BOUND_MAX = 0.95
_RECENT = 0.05
_HALVINGS = 60


class Agreement(BaseModel):
    """State of the test for one judge. Immutable: `with_pair` returns the next state."""

    model_config = ConfigDict(frozen=True)

    pairs: int = 0
    total: float = 0.0
    """Sum of the disagreements of the reference."""
    recent: float | None = None
    """Exponential moving average of the disagreements; the newest has a weight of 1/20."""
    bound: float | None = None
    """Upper bound of the mean disagreement without drift. None until the reference is complete."""
    won: tuple[float, ...] = (0.0,) * len(_STAKES)
    """Capital of the bets that have begun, for each of `_STAKES`."""

    def with_pair(self, disagreement: float, *, reference: int, error: float) -> Agreement:
        """Return the state after one more run, with a `disagreement` from 0 to 1."""
        recent = disagreement if self.recent is None else self.recent + _RECENT * (disagreement - self.recent)
        pairs = self.pairs + 1
        if self.bound is not None:
            won = _after(self.won, pairs - reference, disagreement, self.bound)
            return self.model_copy(update={"pairs": pairs, "recent": recent, "won": won})
        total = self.total + disagreement
        bound = upper_bound(total / pairs, pairs, error / 2) if pairs >= reference else None
        return Agreement(pairs=pairs, total=total, recent=recent, bound=bound)

    def evidence(self, reference: int) -> float:
        """Return the total capital of all bets, including those that have not begun. It is 1 at the start."""
        tested = max(0, self.pairs - reference)
        return math.fsum(self.won) / len(self.won) + 1 / (tested + 1)

    def has_drifted(self, *, reference: int, error: float) -> bool:
        """Return whether the evidence reaches the alarm threshold."""
        return self.bound is not None and self.evidence(reference) >= alarm_at(error)


def alarm_at(error: float) -> float:
    """Return the evidence that raises an alarm. The bound of the reference has used the other half of `error`."""
    return 2 / error


def _after(won: Sequence[float], number: int, disagreement: float, bound: float) -> tuple[float, ...]:
    """Return the capital of each strategy after its bet number `number`. The capital is capped, so it stays finite."""
    begun = 1 / (number * (number + 1))
    paid = [1 + stake / bound * (disagreement - bound) for stake in _STAKES]
    return tuple(min(1e12, (before + begun) * factor) for before, factor in zip(won, paid, strict=True))


def upper_bound(mean: float, count: int, error: float) -> float:
    """Return an upper confidence bound of the mean of values from 0 to 1, which fails with a probability of `error`."""
    low, high = mean, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if count * _entropy(mean, middle) < -math.log(error):
            low = middle
        else:
            high = middle
    return min(_BOUND_MAX, high)


def _entropy(mean: float, other: float) -> float:
    """Return the relative entropy of two Bernoulli distributions with these means."""
    entropy = 0.0
    if mean > 0:
        entropy += mean * math.log(mean / other)
    if mean < 1:
        entropy += (1 - mean) * math.log((1 - mean) / max(1e-300, 1 - other))
    return entropy
