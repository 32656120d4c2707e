"""Are the arms as large as they should be? If not, units got lost or were counted twice, and no difference means much.

Lindon & Malek, "Anytime-valid inference for multinomial count data" (NeurIPS 2022, arXiv 2011.03567): the Bayes factor
of a multinomial whose probabilities have a Dirichlet distribution against the ones that were planned. Unit by unit it
grows by the factor q(arm) / p(arm), where p is planned and q = (κ p + units of that arm so far) / (κ + units so far).
Σ p · q/p = 1, so it is a martingale from 1 when p is right, and P(it is ever 1/α) ≤ α. p may change with every unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_STRENGTH = 100.0
"""κ: how many units the plan is worth. More notices small faults sooner, less notices large ones sooner."""


@dataclass(slots=True)
class SampleRatio:
    """Two arms."""

    candidates: int = 0
    controls: int = 0
    log_evidence: float = 0.0

    def see(self, *, candidate: bool, planned: float = 0.5) -> None:
        """One more unit, of which the candidate's arm should get the share `planned`."""
        arm, probability = (self.candidates, planned) if candidate else (self.controls, 1.0 - planned)
        expected = (_STRENGTH * probability + arm) / (_STRENGTH + self.candidates + self.controls)
        self.log_evidence += math.log(expected / probability)
        if candidate:
            self.candidates += 1
        else:
            self.controls += 1

    def broken(self, error: float) -> bool:
        """Whether the planned shares are refuted, wrongly with probability `error` at most, over all time."""
        return self.log_evidence >= -math.log(error)
