"""Judges that stay as they are and judges that drift, before the alarm that `headrace_scorer.agreement_test` is."""

from __future__ import annotations

import numpy as np

from headrace_scorer.agreement_test import Agreement

ERROR, REFERENCE = 0.05, 200
_FLIPPED = 0.2


def disagreements(draw: np.random.Generator, pairs: int, wrong: float) -> list[float]:
    """Of people who say 0 or 1, a fifth of them wrongly, and a judge who is on the wrong side so often."""
    good = draw.random(pairs) < 0.5
    said = good ^ (draw.random(pairs) < _FLIPPED)
    sees = good ^ (draw.random(pairs) < wrong)
    value = np.where(sees, 0.75, 0.0) + draw.random(pairs) * 0.25
    return [float(one) for one in np.abs(value - said)]


def alarm(values: list[float]) -> int | None:
    """After how many pairs it is raised; None when it never is."""
    state = Agreement()
    for number, value in enumerate(values, 1):
        state = state.seen(value, reference=REFERENCE, error=ERROR)
        if state.has_drifted(reference=REFERENCE, error=ERROR):
            return number
    return None


def false_alarms(seed: int, streams: int, pairs: int) -> float:
    """Of judges that never change."""
    draw = np.random.default_rng([seed, 3])
    found = [alarm(disagreements(draw, pairs, draw.uniform(0.05, 0.3))) for _ in range(streams)]
    return float(np.mean([one is not None for one in found]))


def delays(seed: int, streams: int, well: int, ill: int, wrong: float) -> list[int | None]:
    """After how many pairs a judge is found who was wrong in one of ten for `well` pairs, and then in `wrong`.

    None: not within `ill` pairs. An alarm before the change is a negative delay.
    """
    draw = np.random.default_rng([seed, 4])
    found = [alarm(disagreements(draw, well, 0.1) + disagreements(draw, ill, wrong)) for _ in range(streams)]
    return [None if one is None else one - well for one in found]
