"""Several gamblers with equal parts of one unit of money: each expects another effect, one about the right one.

The sum of their wealth is again a non-negative supermartingale that begins with 1, so `betting`'s bound holds for it
(a mixture of bets: Waudby-Smith & Ramdas 2023, section 4 and appendix on diversified bets). A gambler who expects a
small effect bets too little on a disaster, one who expects a disaster loses on a small effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace_registry.betting import Bets


class Hedge:
    """Against "the mean is at most `null`", for values of [-1, 1]."""

    def __init__(self, null: float, gaps: Sequence[float]) -> None:
        self._gamblers = [Bets(null=null, gap=gap) for gap in gaps]

    def see(self, value: float) -> None:
        for gambler in self._gamblers:
            gambler.see(value)

    @property
    def log_wealth(self) -> float:
        logs = [gambler.log_wealth for gambler in self._gamblers]
        most = max(logs)
        return most + math.log(math.fsum(math.exp(one - most) for one in logs) / len(logs))

    def convinced(self, error: float) -> bool:
        return self.log_wealth >= -math.log(error)

    @property
    def count(self) -> int:
        return self._gamblers[0].count

    @property
    def mean(self) -> float:
        return self._gamblers[0].mean

    @property
    def standard_error(self) -> float | None:
        return self._gamblers[0].standard_error
