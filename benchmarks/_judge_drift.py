"""Stable and drifting judges, as input of the drift alarm in `headrace_scorer.agreement_test`."""

from __future__ import annotations

import numpy as np

from headrace_scorer.agreement_test import Agreement

ERROR, REFERENCE = 0.05, 200
_FLIPPED = 0.2


def disagreements(draw: np.random.Generator, pairs: int, wrong: float) -> list[float]:
    """Return the absolute differences between people's labels 0 or 1, a fifth of them wrong, and a judge.

    Args:
        wrong: share of runs for which the judge prefers the wrong side.
    """
    good = draw.random(pairs) < 0.5
    labels = good ^ (draw.random(pairs) < _FLIPPED)
    sees = good ^ (draw.random(pairs) < wrong)
    value = np.where(sees, 0.75, 0.0) + draw.random(pairs) * 0.25
    return [float(difference) for difference in np.abs(value - labels)]


def alarm(values: list[float]) -> int | None:
    """Return the number of pairs after which the alarm is raised, or None."""
    state = Agreement()
    for number, value in enumerate(values, 1):
        state = state.with_pair(value, reference=REFERENCE, error=ERROR)
        if state.has_drifted(reference=REFERENCE, error=ERROR):
            return number
    return None


def false_alarms(seed: int, streams: int, pairs: int) -> float:
    """Return the share of stable judges for which the alarm is raised."""
    draw = np.random.default_rng([seed, 3])
    alarms = [alarm(disagreements(draw, pairs, draw.uniform(0.05, 0.3))) for _ in range(streams)]
    return float(np.mean([number is not None for number in alarms]))


def delays(seed: int, streams: int, well: int, ill: int, wrong: float) -> list[int | None]:
    """Return the number of pairs after which drifting judges are detected.

    A judge is wrong in one of ten pairs for `well` pairs, and then in the share `wrong`. None means that it is not
    detected within `ill` pairs. An alarm before the change is a negative delay.
    """
    draw = np.random.default_rng([seed, 4])
    alarms = [alarm(disagreements(draw, well, 0.1) + disagreements(draw, ill, wrong)) for _ in range(streams)]
    return [None if number is None else number - well for number in alarms]
