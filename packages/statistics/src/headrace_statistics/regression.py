"""Linear regression of a unit's value on a number that was known beforehand, fitted to the units so far.

It works as CUPED does (Deng, Xu, Kohavi & Walker, "Improving the sensitivity of online controlled experiments by
utilizing pre-experiment data", WSDM 2013): the share of the variance that the line explains is removed. Here the line
is fitted to the earlier units of both arms together. Its prediction of the next unit is therefore known before that
unit's arm is, and `contrast` stays fair however wrong the prediction is. The line begins as "the value is what was
expected".
"""

from __future__ import annotations

from dataclasses import dataclass

_BELIEF = 1.0
"""Spread of expectations that the first guess of the slope, 1, is worth."""


@dataclass(slots=True)
class Regression:
    """Regression of values on expectations, both in [0, 1]."""

    count: int = 0
    value_mean: float = 0.0
    expected_mean: float = 0.0
    spread: float = 0.0
    joint: float = 0.0

    def predict(self, expected: float) -> float:
        """Return the predicted value of the next unit, in [0, 1]. One imaginary unit in the middle precedes all
        others."""
        slope = (self.joint + _BELIEF) / (self.spread + _BELIEF)
        level = (self.value_mean * self.count + 0.5) / (self.count + 1)
        centre = (self.expected_mean * self.count + 0.5) / (self.count + 1)
        return min(1.0, max(0.0, level + slope * (expected - centre)))

    def update(self, expected: float, value: float) -> None:
        """Add one unit (Welford's recurrence)."""
        self.count += 1
        off = expected - self.expected_mean
        self.expected_mean += off / self.count
        self.value_mean += (value - self.value_mean) / self.count
        self.spread += off * (expected - self.expected_mean)
        self.joint += off * (value - self.value_mean)
