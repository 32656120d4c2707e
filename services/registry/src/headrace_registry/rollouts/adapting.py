"""An adaptive split: candidates that are probably not the best of those under way get less than their stage has.

Thompson's rule (Biometrika 1933): a candidate's part is how probable it is, by what its sessions show, that it is the
best one. The parts are relative to the leader's, which keeps all that its stage has, and none falls below `floor`. So a
share is never larger than the plan says, and only the past decides about it.

Control is as wide as the candidate, always, and nested in one block (`headrace_schemas.assignment`). Given that a unit
is in a candidate or in its control it is in the candidate's with probability 1/2, whatever its share is at that moment:
the statistics need no weights, and their errors are those of an even split. `make bench NAME=rollout` plays it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

_STEPS = 16
"""A part is a multiple of 1/16: a share that hardly changes is no news for every gateway."""
_GRID = 400
_WIDE = 6.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A candidate less its control, more being better. Without a `standard_error` nothing is known of it."""

    mean: float
    standard_error: float | None


def probabilities_of_best(estimates: Mapping[str, Estimate], expected: float) -> dict[str, float]:
    """How probable it is of each that it is the best of them. `expected` is how far versions usually are apart: the
    spread of the prior around no difference."""
    beliefs = {name: _belief(one, expected) for name, one in estimates.items()}
    low = min(one.mean - _WIDE * one.stdev for one in beliefs.values())
    high = max(one.mean + _WIDE * one.stdev for one in beliefs.values())
    grid = [low + (high - low) * (place + 0.5) / _GRID for place in range(_GRID)]
    below = {name: [one.cdf(value) for value in grid] for name, one in beliefs.items()}
    found = {
        name: math.fsum(
            one.pdf(value) * math.prod(below[other][place] for other in beliefs if other != name)
            for place, value in enumerate(grid)
        )
        for name, one in beliefs.items()
    }
    total = math.fsum(found.values())
    return {name: part / total for name, part in found.items()}


def parts(probabilities: Mapping[str, float], floor: Fraction) -> dict[str, Fraction]:
    """What each gets of its stage's share: 1 for the leader, the others as they are beside it."""
    most = max(probabilities.values())
    found = {name: Fraction(math.ceil(_STEPS * one / most), _STEPS) for name, one in probabilities.items()}
    return {name: max(floor, min(Fraction(1), one)) for name, one in found.items()}


def _belief(one: Estimate, expected: float) -> NormalDist:
    """The prior and what was seen, each by its precision."""
    if not one.standard_error:
        return NormalDist(0.0, expected)
    prior, seen = 1.0 / expected**2, 1.0 / one.standard_error**2
    return NormalDist(one.mean * seen / (prior + seen), 1.0 / math.sqrt(prior + seen))
