"""Mixture of e-processes: several gamblers share one unit of money, each expects another effect, and one is about
right.

The sum of their wealth is again a non-negative supermartingale that begins with 1, so the bound of `EProcess` holds for
it (diversified bets: Waudby-Smith & Ramdas 2023, section 5). A gambler who expects a small effect bets too little on a
disaster; one who expects a disaster loses on a small effect.
"""

from __future__ import annotations

import math

from headrace_statistics.e_process import EProcess

PARTS = ((1.0, 2.0 / 3.0), (2.0, 1.0 / 3.0))
"""The effect that each gambler expects, in gaps, and its part of the money."""


class MixtureEProcess:
    """E-process against "the mean is at most `null`", for values of [-1, 1]. `gap` is the effect that must not be
    missed."""

    def __init__(self, null: float, gap: float) -> None:
        self._gamblers = [(EProcess(null=null, gap=times * gap), math.log(part)) for times, part in PARTS]

    def update(self, value: float) -> None:
        for gambler, _ in self._gamblers:
            gambler.update(value)

    @property
    def log_wealth(self) -> float:
        logs = [log_part + gambler.log_wealth for gambler, log_part in self._gamblers]
        largest = max(logs)
        return largest + math.log(math.fsum(math.exp(log_wealth_part - largest) for log_wealth_part in logs))

    def null_rejected(self, error: float) -> bool:
        return self.log_wealth >= -math.log(error)
