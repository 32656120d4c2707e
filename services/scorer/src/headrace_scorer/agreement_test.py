"""Whether a judge has begun to agree with people less than it did: a sequential test with a bounded false alarm rate.

Each run that both have scored gives a disagreement from 0 to 1. The first ones are the reference: from them follows a
mean that the true one does not exceed, but for half of the allowed error (W. Hoeffding, JASA 58 (1963) 13, theorem 1,
in the form of a relative entropy). Every later one is a bet against the mean being at most that. A bet may begin at any
run: the start is mixed with the weights 1/(n(n+1)), so that a judge which was good for long has not used up the alarm
(I. Waudby-Smith and A. Ramdas, JRSS B 86 (2024) 1, for the bets). What the bets have won together is an e-process, and
by Ville's inequality it reaches 1/error with a probability of at most that error, however long one looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

_STAKES = (0.1, 0.3, 0.6, 0.9)
"""Shares of the largest bet that can be lost without debts; their mean is what counts."""
_BOUND_MAX = 0.95
_RECENT = 0.05
_HALVINGS = 60


class Agreement(BaseModel):
    """One judge and people so far. Immutable: `seen` returns the next one."""

    model_config = ConfigDict(frozen=True)

    pairs: int = 0
    total: float = 0.0
    """Of the disagreements of the reference."""
    recent: float | None = None
    """An average of disagreements in which each newer one counts with a twentieth."""
    bound: float | None = None
    """What the mean disagreement does not exceed while all is well; None while the reference is gathered."""
    won: tuple[float, ...] = (0.0,) * len(_STAKES)

    def seen(self, disagreement: float, *, reference: int, error: float) -> Agreement:
        """With one more pair; `disagreement` is from 0 to 1."""
        recent = disagreement if self.recent is None else self.recent + _RECENT * (disagreement - self.recent)
        pairs = self.pairs + 1
        if self.bound is not None:
            won = _after(self.won, pairs - reference, disagreement, self.bound)
            return self.model_copy(update={"pairs": pairs, "recent": recent, "won": won})
        total = self.total + disagreement
        bound = upper_bound(total / pairs, pairs, error / 2) if pairs >= reference else None
        return Agreement(pairs=pairs, total=total, recent=recent, bound=bound)

    def evidence(self, reference: int) -> float:
        """What the bets have won, with those that have not begun. 1 at the start."""
        tested = max(0, self.pairs - reference)
        return math.fsum(self.won) / len(self.won) + 1 / (tested + 1)

    def has_drifted(self, *, reference: int, error: float) -> bool:
        return self.bound is not None and self.evidence(reference) >= alarm_at(error)


def alarm_at(error: float) -> float:
    """The evidence of an alarm. The reference has spent the other half of the error."""
    return 2 / error


def _after(won: Sequence[float], number: int, disagreement: float, bound: float) -> tuple[float, ...]:
    """The bets after their `number`-th pair, the newest among them. What is won stays finite."""
    begun = 1 / (number * (number + 1))
    paid = [1 + stake / bound * (disagreement - bound) for stake in _STAKES]
    return tuple(min(1e12, (before + begun) * factor) for before, factor in zip(won, paid, strict=True))


def upper_bound(mean: float, count: int, error: float) -> float:
    """A mean that the true one of values from 0 to 1 exceeds with a probability of at most `error`."""
    low, high = mean, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if count * _entropy(mean, middle) < -math.log(error):
            low = middle
        else:
            high = middle
    return min(_BOUND_MAX, high)


def _entropy(mean: float, other: float) -> float:
    """Of one coin relative to another one."""
    found = 0.0
    if mean > 0:
        found += mean * math.log(mean / other)
    if mean < 1:
        found += (1 - mean) * math.log((1 - mean) / max(1e-300, 1 - other))
    return found
