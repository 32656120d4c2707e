"""Turns two arms into one sequence of numbers in [-1, 1] whose mean is half the difference of the arms.

A unit of the comparison is in the candidate's arm (A = 1) or the control's (A = 0) with probability 1/2, whatever came
before. With the value y in [0, 1] and any number c that was known before, x = (2A - 1)(y - c) has

    E[x | past] = (E[y | candidate] - E[y | control]) / 2,

which is the estimate by inverse propensity, halved and centred (Horvitz & Thompson 1952; for sequences Howard, Ramdas,
McAuliffe & Sekhon, Ann. Statist. 2021). It holds unit by unit: effects of the hour of the day on both arms cancel,
because the control is concurrent. No pairs are formed, so no arm waits for the other. `c` is the mean of all earlier
units, or their prediction for a unit with this expectation (`Regression`); it only reduces variance.

`Regression` of a unit's value on a number that was known beforehand, fitted to the units so far, works as CUPED does
(Deng, Xu, Kohavi & Walker, "Improving the sensitivity of online controlled experiments by utilizing pre-experiment
data", WSDM 2013): the share of the variance that the line explains is removed. Here the line is fitted to the earlier
units of both arms together. Its prediction of the next unit is therefore known before that unit's arm is, and
`contrast` stays fair however wrong the prediction is. The line begins as "the value is what was expected".
"""

from __future__ import annotations

from dataclasses import dataclass, field

_BELIEF = 1.0
"""Weight of the slope's prior value, 1: it counts as so much `Regression.spread` of earlier units."""


@dataclass(slots=True)
class Regression:
    """Linear regression of units' values on their expected values, both in [0, 1], with a prior slope of 1.

    `spread` is the sum of squared deviations of the expected values from their mean, `joint` that of the products of
    the deviations of expected values and values.
    """

    count: int = 0
    value_mean: float = 0.0
    expected_mean: float = 0.0
    spread: float = 0.0
    joint: float = 0.0

    def predict(self, expected: float) -> float:
        """Return the predicted value, in [0, 1], of the next unit with this expected value.

        The means begin with one imaginary unit at 1/2.
        """
        slope = (self.joint + _BELIEF) / (self.spread + _BELIEF)
        level = (self.value_mean * self.count + 0.5) / (self.count + 1)
        centre = (self.expected_mean * self.count + 0.5) / (self.count + 1)
        return min(1.0, max(0.0, level + slope * (expected - centre)))

    def update(self, expected: float, value: float) -> None:
        """Add the next unit (Welford's recurrence)."""
        self.count += 1
        off = expected - self.expected_mean
        self.expected_mean += off / self.count
        self.value_mean += (value - self.value_mean) / self.count
        self.spread += off * (expected - self.expected_mean)
        self.joint += off * (value - self.value_mean)


@dataclass(slots=True)
class Contrast:
    """Converter of a sequence of units in two arms to numbers x whose mean is half the difference of the arms.

    `count` and `total` are those of the earlier units' values. Their mean, with one imaginary value of 1/2, is the
    centre c of a unit without an expected value.
    """

    count: int = 0
    total: float = 0.0
    regression: Regression = field(default_factory=Regression)

    def of(self, value: float, *, candidate: bool, expected: float | None = None) -> float:
        """Return x of the next unit, and add the unit.

        Args:
            value: the unit's value in [0, 1]; larger is better.
            candidate: whether the unit is in the candidate's arm rather than the control's.
            expected: the value that was expected before the unit's arm was known, or None.
        """
        if expected is None:
            centre = (self.total + 0.5) / (self.count + 1)
        else:
            centre = self.regression.predict(expected)
            self.regression.update(expected, value)
        self.count += 1
        self.total += value
        return value - centre if candidate else centre - value
