"""Simulated runs of known quality, the features that sources report about them, and people who rate a few of them.

All features depend on whether the run is good, so that the probability that a run is good, given its features, is a
product. A reward model's values and intervals are compared with this true probability. Stable and drifting judges are
simulated for the drift alarm in `headrace_scorer.judge_monitor`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace_scorer.judge_monitor import Agreement
from headrace_scorer.learned.models import Thumb, ThumbedRun
from headrace_scorer.learned.thumbs import FittedThumbs

_RATERS = 60
HINTS = {"corrected": (0.12, 0.45, 0.0), "thanked": (0.40, 0.10, 1.0), "looped": (0.05, 0.20, 0.0)}
"""Rates at which good and bad runs show a hint, and the hint's value."""
_TOOL_RATE, _TOOL_WORKED = 0.6, (0.85, 0.55)
JUDGE = "judge:help"
_JUDGE_MEANS, _JUDGE_DEVIATION, _JUDGE_RATE = (0.62, 0.42), 0.2, 0.9
_TURNS = (3.0, 4.0)


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run with its features and its quality. `chance` is the probability that it is good, given its features."""

    name: str
    features: Mapping[str, float]
    good: bool
    chance: float


@dataclass(frozen=True, slots=True)
class People:
    """Raters: the share of runs that they rate, their error rate, and the share of thumbs from poisoners, who invert
    them.
    """

    share: float = 0.03
    flipped: float = 0.2
    poisoners: float = 0.0
    """Share of the thumbs."""
    poisoner_names: int = 3
    named: bool = True


def runs(seed: int, count: int) -> list[KnownRun]:
    """Return runs, half of which are good in expectation."""
    draw = np.random.default_rng([seed, 1])
    return [_run(draw, f"t{seed}-{number}") for number in range(count)]


def _run(draw: np.random.Generator, name: str) -> KnownRun:
    good = bool(draw.random() < 0.5)
    side = 0 if good else 1
    features: dict[str, float] = {}
    odds = 0.0
    hints = []
    for hint, (*rates, value) in HINTS.items():
        has_hint = draw.random() < rates[side]
        odds += _ratio(rates, yes=bool(has_hint))
        if has_hint:
            features[f"function:signals/{hint}"] = value
            hints.append(value)
    if draw.random() < _TOOL_RATE:
        worked = bool(draw.random() < _TOOL_WORKED[side])
        odds += _ratio(_TOOL_WORKED, yes=worked)
        features["function:signals/tool_failed"] = float(worked)
        hints.append(float(worked))
    if hints:
        features["function:signals"] = sum(hints) / len(hints)
    criteria = judge_criteria(draw, good=good)
    if criteria is not None:
        middle = sum(_JUDGE_MEANS) / 2
        odds += (criteria["clarity"] - middle) * (_JUDGE_MEANS[0] - _JUDGE_MEANS[1]) / _JUDGE_DEVIATION**2
        features |= {f"{JUDGE}/{name}": value for name, value in criteria.items()}
        features[JUDGE] = sum(criteria.values()) / len(criteria)
    turns = int(draw.poisson(_TURNS[side]))
    odds += turns * math.log(_TURNS[0] / _TURNS[1]) - _TURNS[0] + _TURNS[1]
    features |= {"run/turns": math.log1p(turns + 1), "run/tokens": float(draw.normal(5, 0.5))}
    return KnownRun(name, features, good, 1 / (1 + math.exp(-odds)))


def judge_criteria(draw: np.random.Generator, *, good: bool) -> dict[str, float] | None:
    """Return the criteria of a judge, one of which depends on the run's quality. The result is None if it abstains."""
    if draw.random() >= _JUDGE_RATE:
        return None
    clarity = float(draw.normal(_JUDGE_MEANS[0 if good else 1], _JUDGE_DEVIATION))
    return {"clarity": clarity, "tone": float(draw.random())}


def without_width_limit(fitted: FittedThumbs) -> FittedThumbs:
    """Return a model that estimates all runs, including those for which it would abstain.

    The runs that it does not abstain from are its own choice, and do not show how well it ranks runs.
    """
    return replace(fitted, requirements=replace(fitted.requirements, width_max=1.0))


def _ratio(rates: Sequence[float], *, yes: bool) -> float:
    good, bad = rates
    return math.log(good / bad) if yes else math.log((1 - good) / (1 - bad))


def thumbed(seed: int, all_runs: Sequence[KnownRun], people: People) -> tuple[list[ThumbedRun], list[KnownRun]]:
    """Return the rated and the unrated runs."""
    draw = np.random.default_rng([seed, 2])
    rated, silent = [], []
    for run in all_runs:
        if draw.random() >= people.share:
            silent.append(run)
            continue
        poisoned = draw.random() < people.poisoners
        wrong = poisoned or draw.random() < people.flipped
        name = f"poisoner {draw.integers(people.poisoner_names)}" if poisoned else f"user {draw.integers(_RATERS)}"
        thumb = Thumb(name if people.named else "", float(run.good is not wrong))
        rated.append(ThumbedRun(run.name, run.features, (thumb,)))
    return rated, silent


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
