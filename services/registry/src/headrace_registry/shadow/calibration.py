"""What a user would have said, foretold from what the judges said: a line fitted by least squares, cut off at 0 and 1.

Only users' own sessions have both. Whoever is foretold takes no part in the fit of the line that foretells it: the
sessions are cut into folds, and each fold has the line of the others (cross-fitting: Chernozhukov et al.,
"Double/debiased machine learning", Econometrics Journal 2018). So the line's own errors do not look like knowledge,
and the corrections that `estimate` makes with the residuals stay unbiased.
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

    def foretell(self, judged: float) -> float:
        return min(1.0, max(0.0, self.level + self.slope * (judged - self.centre)))


def fit(pairs: Sequence[tuple[float, float]]) -> Line:
    """Of (judged, said) pairs; without any, everything is foretold as 1/2. Where all were judged alike, their mean."""
    if not pairs:
        return Line(0.5, 0.0, 0.5)
    centre = math.fsum(judged for judged, _ in pairs) / len(pairs)
    level = math.fsum(said for _, said in pairs) / len(pairs)
    spread = math.fsum((judged - centre) ** 2 for judged, _ in pairs)
    joint = math.fsum((judged - centre) * (said - level) for judged, said in pairs)
    return Line(level, joint / spread if spread > 1e-12 else 0.0, centre)


def fold(number: int) -> int:
    """Of the `number`-th prompt."""
    return number % FOLDS


def lines(known: Sequence[tuple[int, float, float]]) -> tuple[Line, ...]:
    """The line of each fold, fitted on the others. `known`: number of the prompt, judged, said."""
    return tuple(fit([(judged, said) for number, judged, said in known if fold(number) != one]) for one in range(FOLDS))
