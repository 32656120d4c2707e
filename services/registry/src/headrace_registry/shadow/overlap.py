"""May users' answers speak for another version? Only where it would have given them as well.

The answer of a logged session has the weight w = Π π_candidate(token) / π_logged(token) over its tokens, both after the
temperature that it was sampled with (importance sampling; for sequences Precup, Sutton & Singh, "Eligibility traces for
off-policy policy evaluation", ICML 2000). Two things are known of the weights when the versions overlap, and each is
asked:

- Their mean is 1. Where most of what the candidate says was never said, it is near 0, and no number of sessions
repairs that.
- Their effective sample size n_eff = (Σw)² / Σw² (Kong, "A note on importance sampling using standardized weights",
1992;
  Owen, "Monte Carlo theory, methods and examples", section 9.3) says how many answers the sum rests on.

The second alone can be fooled: weights that are all equally tiny have n_eff = n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LOG_MAX = 50.0
MEAN_LOW, MEAN_HIGH = 0.5, 2.0
"""What the mean weight may be. It scatters around 1 by 1/√n_eff or so, which is less than a fifth where n_eff
suffices."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one version with the answers of another one."""

    answers: int
    effective: float
    """n_eff."""
    mean: float
    """Of the weights."""

    def refusal(self, effective_min: float, share_min: float) -> str | None:
        """Why the answers cannot speak for the version; None: they can."""
        if self.answers == 0:
            return "no overlap: no answer has a weight"
        if not MEAN_LOW <= self.mean <= MEAN_HIGH:
            return f"no overlap: the weights of {self.answers} answers have the mean {self.mean:.2g} in place of 1"
        if self.effective < max(effective_min, share_min * self.answers):
            return f"no overlap: {self.answers} answers count as {self.effective:.1f}"
        return None


def weight(log_weight: float) -> float:
    """Of one answer, from the sum of the differences of its logprobs."""
    return math.exp(min(log_weight, _LOG_MAX))


def overlap(log_weights: Sequence[float]) -> Overlap:
    weights = [weight(one) for one in log_weights]
    squares = math.fsum(one * one for one in weights)
    total = math.fsum(weights)
    effective = total * total / squares if squares > 0 else 0.0
    return Overlap(len(weights), effective, total / len(weights) if weights else 0.0)
