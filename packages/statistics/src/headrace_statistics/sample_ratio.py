"""Tests whether the arms have the planned sizes. If not, units were lost or counted twice, and no difference means
much.

Lindon & Malek, "Anytime-valid inference for multinomial count data" (NeurIPS 2022, arXiv 2011.03567): the Bayes factor
of a multinomial with a Dirichlet prior against the planned probabilities. With each unit it grows by the factor q(arm)
/ p(arm), where p is planned and q = (κ p + units of that arm so far) / (κ + units so far). Σ p · q/p = 1, so it is a
martingale from 1 when p is right, and P(it ever reaches 1/α) ≤ α. p may change with every unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_STRENGTH = 100.0
"""κ: the number of units that the plan is worth. A larger κ detects small faults sooner, a smaller κ large ones."""


@dataclass(slots=True)
class SampleRatio:
    """Counts of two arms, and the evidence against the planned ratio."""

    candidates: int = 0
    controls: int = 0
    log_evidence: float = 0.0

    def update(self, *, candidate: bool, planned: float = 0.5) -> None:
        """Add one unit, for which the candidate's arm was planned to have the probability `planned`."""
        arm, probability = (self.candidates, planned) if candidate else (self.controls, 1.0 - planned)
        expected = (_STRENGTH * probability + arm) / (_STRENGTH + self.candidates + self.controls)
        self.log_evidence += math.log(expected / probability)
        if candidate:
            self.candidates += 1
        else:
            self.controls += 1

    def broken(self, error: float) -> bool:
        """Return whether the planned shares are refuted, wrongly with probability `error` at most, over all time."""
        return self.log_evidence >= -math.log(error)
