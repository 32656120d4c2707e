"""Turns two arms into one sequence of numbers in [-1, 1] whose mean is half the difference of the arms.

A unit of the comparison is in the candidate's arm (A = 1) or the control's (A = 0) with probability 1/2, whatever came
before. With the value y in [0, 1] and any number c that was known before, x = (2A - 1)(y - c) has

    E[x | past] = (E[y | candidate] - E[y | control]) / 2,

which is the estimate by inverse propensity, halved and centred (Horvitz & Thompson 1952; for sequences Howard, Ramdas,
McAuliffe & Sekhon, Ann. Statist. 2021). It holds unit by unit: effects of the hour of the day on both arms cancel,
because the control is concurrent. No pairs are formed, so no arm waits for the other. `c` is the mean of all earlier
units, or their prediction for a unit with this expectation (`regression`); it only reduces variance.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_statistics.regression import Regression


@dataclass(slots=True)
class Contrast:
    """The running centre, which begins with one imaginary value in the middle."""

    count: int = 0
    total: float = 0.0
    regression: Regression = field(default_factory=Regression)

    def of(self, value: float, *, candidate: bool, expected: float | None = None) -> float:
        """Return x of one more unit, with `value` in [0, 1], larger being better.

        Args:
            expected: Expected value, known before the unit's arm was, or None.
        """
        if expected is None:
            centre = (self.total + 0.5) / (self.count + 1)
        else:
            centre = self.regression.predict(expected)
            self.regression.update(expected, value)
        self.count += 1
        self.total += value
        return value - centre if candidate else centre - value
