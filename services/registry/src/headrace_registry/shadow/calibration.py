"""Predicts a user's feedback from the judges' scores: a line fitted by least squares, clipped to [0, 1].

Only users' own sessions have both. A session takes no part in the fit of the line that predicts it: the sessions are
divided into folds, and each fold has the line of the others (cross-fitting: Chernozhukov et al., "Double/debiased
machine learning", Econometrics Journal 2018). So the line's own errors do not look like knowledge, and the corrections
that `estimate` makes with the residuals stay unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FOLDS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """y = level + slope (x - centre)."""

    level: float
    slope: float
    centre: float

    def predict(self, judged: float) -> float:
        return min(1.0, max(0.0, self.level + self.slope * (judged - self.centre)))


def fit(pairs: Sequence[tuple[float, float]]) -> Line:
    """Fit a line to pairs of judgement and feedback. Without pairs, it predicts 1/2; if all judgements are equal, the
    mean."""
    if not pairs:
        return Line(0.5, 0.0, 0.5)
    centre = math.fsum(judged for judged, _ in pairs) / len(pairs)
    level = math.fsum(feedback for _, feedback in pairs) / len(pairs)
    spread = math.fsum((judged - centre) ** 2 for judged, _ in pairs)
    joint = math.fsum((judged - centre) * (feedback - level) for judged, feedback in pairs)
    return Line(level, joint / spread if spread > 1e-12 else 0.0, centre)


def fold(number: int) -> int:
    """Return the fold of the `number`-th prompt."""
    return number % FOLDS


def lines(sessions: Sequence[tuple[int, float, float]]) -> tuple[Line, ...]:
    """Return the line of each fold, fitted to the other folds.

    Args:
        sessions: Number of the prompt, judgement and feedback of each session.
    """
    return tuple(
        fit([(judged, feedback) for number, judged, feedback in sessions if fold(number) != held_out])
        for held_out in range(FOLDS)
    )
