"""From two arms to one sequence of numbers in [-1, 1] whose mean is half the difference of the arms.

A unit of the comparison is in the candidate's arm (A = 1) or the control's (A = 0) with probability 1/2, whatever came
before. With the value y in [0, 1] and any number c that was known before, x = (2A - 1)(y - c) has

    E[x | what came before] = (E[y | candidate] - E[y | control]) / 2,

which is the estimate by inverse propensity, halved and centred (Horvitz & Thompson 1952; for sequences Howard, Ramdas,
McAuliffe & Sekhon, Ann. Statist. 2021). It holds unit by unit: what the hour of the day does to both arms cancels,
because control is concurrent. No pairs are formed, so no arm waits for the other. `c`, the mean of all units before,
or what units before say of one of which so much was expected (`regression`), only takes variance away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_registry.rollouts.regression import Regression


@dataclass(slots=True)
class Contrast:
    """The running centre. It begins with one imaginary value in the middle."""

    count: int = 0
    total: float = 0.0
    regression: Regression = field(default_factory=Regression)

    def of(self, value: float, *, candidate: bool, expected: float | None = None) -> float:
        """x of one more unit, with `value` in [0, 1], more being better. `expected` is what it was expected to be, by
        something that was known before its arm was; None: nobody knew."""
        if expected is None:
            centre = (self.total + 0.5) / (self.count + 1)
        else:
            centre = self.regression.foretell(expected)
            self.regression.see(expected, value)
        self.count += 1
        self.total += value
        return value - centre if candidate else centre - value
