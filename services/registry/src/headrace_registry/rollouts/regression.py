"""What a unit's value is expected to be, from a number that was known before: the units so far, on a line.

As CUPED takes out of an experiment what was known before it (Deng, Xu, Kohavi & Walker, "Improving the sensitivity of
online controlled experiments by utilizing pre-experiment data", WSDM 2013): of the variance, the share that the line
explains goes. Here the line is fitted to the units before, of both arms together, so what it says of the next one is
known before that one's arm is, and `contrast` stays fair however wrong it is. It begins as "the value is what was
expected".
"""

from __future__ import annotations

from dataclasses import dataclass

_BELIEF = 1.0
"""How much spread of expectations the first guess of the slope, 1, is worth."""


@dataclass(slots=True)
class Regression:
    """Values on expectations, both in [0, 1]."""

    count: int = 0
    value_mean: float = 0.0
    expected_mean: float = 0.0
    spread: float = 0.0
    joint: float = 0.0

    def foretell(self, expected: float) -> float:
        """Of the next unit, in [0, 1]. One imaginary unit in the middle was seen before all others."""
        slope = (self.joint + _BELIEF) / (self.spread + _BELIEF)
        level = (self.value_mean * self.count + 0.5) / (self.count + 1)
        centre = (self.expected_mean * self.count + 0.5) / (self.count + 1)
        return min(1.0, max(0.0, level + slope * (expected - centre)))

    def see(self, expected: float, value: float) -> None:
        """One more unit (Welford's recurrence)."""
        self.count += 1
        off = expected - self.expected_mean
        self.expected_mean += off / self.count
        self.value_mean += (value - self.value_mean) / self.count
        self.spread += off * (expected - self.expected_mean)
        self.joint += off * (value - self.value_mean)
