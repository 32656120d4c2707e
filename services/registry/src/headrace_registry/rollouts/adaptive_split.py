"""Adaptive split of traffic: candidates that are probably not the best of those in progress get less than the share of
their stage.

Thompson's rule (Biometrika 1933): the part that a candidate gets is the probability, given its sessions so far, that it
is the best candidate. The parts are divided by that of the leader, which gets the whole share of its stage, and none is
below `floor`. So a share is never larger than the plan allows, and it depends only on the past.

The control of a candidate always has the same share as the candidate, in the same block
(`headrace_schemas.rules.assignment`). A unit that is in a candidate or its control is in the candidate with probability
1/2, whatever the share is at that time. So the statistics need no weights, and their errors are those of an even split.
`make bench NAME=rollout` simulates it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

_STEPS = 16
"""Parts are multiples of 1/16, so that a tiny change does not cause a new routing for the gateways."""
_GRID = 400
_WIDE = 6.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated difference between a candidate and its control. A larger value is better for the candidate.

    `standard_error` is None before the first units of both arms.
    """

    mean: float
    standard_error: float | None


def probabilities_of_best(estimates: Mapping[str, Estimate], expected: float) -> dict[str, float]:
    """Return for each candidate the probability that it is the best one.

    Args:
        expected: standard deviation of the normal prior with mean 0, which is the usual difference between versions.
    """
    beliefs = {name: _posterior(belief, expected) for name, belief in estimates.items()}
    lowest = min(belief.mean - _WIDE * belief.stdev for belief in beliefs.values())
    highest = max(belief.mean + _WIDE * belief.stdev for belief in beliefs.values())
    grid = [lowest + (highest - lowest) * (index + 0.5) / _GRID for index in range(_GRID)]
    lower_probabilities = {name: [belief.cdf(value) for value in grid] for name, belief in beliefs.items()}
    weights = {
        name: math.fsum(
            belief.pdf(value) * math.prod(lower_probabilities[rival][index] for rival in beliefs if rival != name)
            for index, value in enumerate(grid)
        )
        for name, belief in beliefs.items()
    }
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def share_parts(probabilities: Mapping[str, float], floor: Fraction) -> dict[str, Fraction]:
    """Return for each candidate the part of its stage's share that it gets. The leader, the most probable candidate,
    gets 1.

    The parts are in proportion to the probabilities, and at least `floor`.
    """
    highest = max(probabilities.values())
    parts = {name: Fraction(math.ceil(_STEPS * part / highest), _STEPS) for name, part in probabilities.items()}
    return {name: max(floor, min(Fraction(1), part)) for name, part in parts.items()}


def _posterior(estimate: Estimate, expected: float) -> NormalDist:
    """Return the normal posterior distribution of a candidate's difference, computed from the prior and the estimate.

    Args:
        expected: standard deviation of the prior, whose mean is 0.
    """
    if not estimate.standard_error:
        return NormalDist(0.0, expected)
    prior, evidence = 1.0 / expected**2, 1.0 / estimate.standard_error**2
    return NormalDist(estimate.mean * evidence / (prior + evidence), 1.0 / math.sqrt(prior + evidence))
