"""Checks whether users' answers can stand for another version: only where it would have given them as well.

The answer of a logged session has the weight w = Π π_candidate(token) / π_logged(token) over its tokens, both after the
temperature that it was sampled with (importance sampling; for sequences Precup, Sutton & Singh, "Eligibility traces for
off-policy policy evaluation", ICML 2000). Two properties hold when the versions overlap, and both are checked:

- The mean of the weights is 1. Where most of the candidate's answers were never given, it is near 0, and no number of
sessions repairs that.

- The effective sample size n_eff = (Σw)² / Σw² (Kong, "A note on importance sampling using standardized weights", 1992;
Owen, "Monte Carlo theory, methods and examples", section 9.3) is the number of answers that the sum rests on.

The second property alone can mislead: weights that are all equally tiny have n_eff = n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LOG_MAX = 50.0
MEAN_LOW, MEAN_HIGH = 0.5, 2.0
"""Bounds of the mean weight. It scatters around 1 by about 1/√n_eff: less than a fifth where n_eff suffices."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of one version with the answers of another one."""

    answers: int
    effective: float
    """n_eff."""
    mean: float
    """Mean of the weights."""

    def refusal(self, effective_min: float, share_min: float) -> str | None:
        """Return why the answers cannot stand for the version, or None if they can."""
        if self.answers == 0:
            return "no overlap: no answer has a weight"
        if not MEAN_LOW <= self.mean <= MEAN_HIGH:
            return f"no overlap: the weights of {self.answers} answers have the mean {self.mean:.2g} in place of 1"
        if self.effective < max(effective_min, share_min * self.answers):
            return f"no overlap: {self.answers} answers count as {self.effective:.1f}"
        return None


def weight(log_weight: float) -> float:
    """Return the weight of one answer from the sum of the differences of its logprobs."""
    return math.exp(min(log_weight, _LOG_MAX))


def overlap(log_weights: Sequence[float]) -> Overlap:
    """Return the overlap from the log weights of the answers."""
    weights = [weight(log_weight_of_answer) for log_weight_of_answer in log_weights]
    squares = math.fsum(log_weight_of_answer * log_weight_of_answer for log_weight_of_answer in weights)
    total = math.fsum(weights)
    effective = total * total / squares if squares > 0 else 0.0
    return Overlap(len(weights), effective, total / len(weights) if weights else 0.0)
