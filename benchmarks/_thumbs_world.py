"""Runs whose worth is known, what sources say of them, and people who speak of a few.

Everything that a source says depends on whether the run is good, so how probable that is given all of it is a product:
the truth that a reward model's values and intervals are held to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace_scorer.learned.models import Thumb, ThumbedRun
from headrace_scorer.learned.thumbs import FittedThumbs

_RATERS = 60
HINTS = {"corrected": (0.12, 0.45, 0.0), "thanked": (0.40, 0.10, 1.0), "looped": (0.05, 0.20, 0.0)}
"""How often a good run and a bad one show a hint, and for what it speaks."""
_TOOL_RATE, _TOOL_WORKED = 0.6, (0.85, 0.55)
JUDGE = "judge:help"
_JUDGE_MEANS, _JUDGE_DEVIATION, _JUDGE_RATE = (0.62, 0.42), 0.2, 0.9
_TURNS = (3.0, 4.0)


@dataclass(frozen=True, slots=True)
class KnownRun:
    """`chance`: how probable it is that it is good, given its features."""

    name: str
    features: Mapping[str, float]
    good: bool
    chance: float


@dataclass(frozen=True, slots=True)
class People:
    """Who speaks of how many runs, how often wrongly, and how many of those who speak turn everything round."""

    share: float = 0.03
    flipped: float = 0.2
    poisoners: float = 0.0
    """Share of the thumbs."""
    poisoner_names: int = 3
    named: bool = True


def runs(seed: int, count: int) -> list[KnownRun]:
    """Half of them are good."""
    draw = np.random.default_rng([seed, 1])
    return [_run(draw, f"t{seed}-{number}") for number in range(count)]


def _run(draw: np.random.Generator, name: str) -> KnownRun:
    good = bool(draw.random() < 0.5)
    side = 0 if good else 1
    found: dict[str, float] = {}
    odds = 0.0
    hints = []
    for hint, (*rates, value) in HINTS.items():
        shown = draw.random() < rates[side]
        odds += _ratio(rates, yes=bool(shown))
        if shown:
            found[f"function:signals/{hint}"] = value
            hints.append(value)
    if draw.random() < _TOOL_RATE:
        worked = bool(draw.random() < _TOOL_WORKED[side])
        odds += _ratio(_TOOL_WORKED, yes=worked)
        found["function:signals/tool_failed"] = float(worked)
        hints.append(float(worked))
    if hints:
        found["function:signals"] = sum(hints) / len(hints)
    said = judge_says(draw, good=good)
    if said is not None:
        middle = sum(_JUDGE_MEANS) / 2
        odds += (said["clarity"] - middle) * (_JUDGE_MEANS[0] - _JUDGE_MEANS[1]) / _JUDGE_DEVIATION**2
        found |= {f"{JUDGE}/{name}": value for name, value in said.items()}
        found[JUDGE] = sum(said.values()) / len(said)
    turns = int(draw.poisson(_TURNS[side]))
    odds += turns * math.log(_TURNS[0] / _TURNS[1]) - _TURNS[0] + _TURNS[1]
    found |= {"run/turns": math.log1p(turns + 1), "run/tokens": float(draw.normal(5, 0.5))}
    return KnownRun(name, found, good, 1 / (1 + math.exp(-odds)))


def judge_says(draw: np.random.Generator, *, good: bool) -> dict[str, float] | None:
    """The criteria of a judge: one that has to do with the run's worth, one that has not. It abstains now and then."""
    if draw.random() >= _JUDGE_RATE:
        return None
    clarity = float(draw.normal(_JUDGE_MEANS[0 if good else 1], _JUDGE_DEVIATION))
    return {"clarity": clarity, "tone": float(draw.random())}


def bold(fitted: FittedThumbs) -> FittedThumbs:
    """It says what it thinks of each run, also where it is not sure: those that it is sure of are its own choice, and
    tell nothing of how well it orders runs."""
    return replace(fitted, demands=replace(fitted.demands, width_max=1.0))


def _ratio(rates: Sequence[float], *, yes: bool) -> float:
    good, bad = rates
    return math.log(good / bad) if yes else math.log((1 - good) / (1 - bad))


def thumbed(seed: int, told: Sequence[KnownRun], people: People) -> tuple[list[ThumbedRun], list[KnownRun]]:
    """Runs that somebody spoke of, and the others."""
    draw = np.random.default_rng([seed, 2])
    spoken, silent = [], []
    for run in told:
        if draw.random() >= people.share:
            silent.append(run)
            continue
        poisoned = draw.random() < people.poisoners
        wrong = poisoned or draw.random() < people.flipped
        name = f"poisoner {draw.integers(people.poisoner_names)}" if poisoned else f"user {draw.integers(_RATERS)}"
        thumb = Thumb(name if people.named else "", float(run.good is not wrong))
        spoken.append(ThumbedRun(run.name, run.features, (thumb,)))
    return spoken, silent
