"""Several candidates at a time with an adaptive split, played by the registry's own statistics and its own rule.

Users come one by one and stand somewhere on the line of `headrace_schemas.assignment`. Each candidate's sessions and
its control's are read some arrivals later, and every 20 readings of a candidate its share may move. A candidate that
did harm is taken back, and its block is the champion's again. Either nobody is promoted, and everything goes on to the
end: so errors are counted. Or the first one that is good enough ends it: so it is seen who met the others until then.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction

from headrace_registry.rollouts.adapting import parts, probabilities_of_best
from headrace_registry.rollouts.evidence import Evidence
from headrace_registry.rollouts.maturity import Unit, UnitReading
from headrace_registry.rollouts.plan import Guardrail, RolloutPlan, RolloutStage

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
SUCCESS = 0.7
SESSIONS = 2400
_LAG = 40
"""Arrivals between a session and its reading."""
_EVERY_UNITS = 20


def plan_of(split: str) -> RolloutPlan:
    """The default's guardrails on rewards, one stage, one reading."""
    return RolloutPlan.model_validate(
        {
            "slots": 3,
            "split": split,
            "stages": (RolloutStage(share=Fraction(1, 4)),),
            "exposure_max": Fraction(1, 4),
            "guardrails": (
                Guardrail(metric="reward", margin=0.1, weight=6),
                Guardrail(metric="missing", margin=0.1),
            ),
            "watched": (),
            "maturity_s": 600.0,
            "closing_s": 600.0,
        }
    )


@dataclass
class Played:
    """One rollout of several candidates, by candidate."""

    rolled_back: list[bool]
    met: list[int]
    """Sessions that met it."""
    read: list[int]
    """Its units and its control's."""


@dataclass
class _Candidate:
    evidence: Evidence
    share: float
    met: int = 0
    moved_at: int = 0
    out: bool = False


def play_one(
    plan: RolloutPlan, worse: Sequence[float], seed: int, sessions: int = SESSIONS, *, promotes: bool = False
) -> Played:
    """`worse` is how much less probable a success is with each candidate than with the champion."""
    chance = random.Random(seed)
    block = 1.0 / (plan.slots + 1)
    share = float(plan.stages[0].share)
    candidates = [_Candidate(Evidence(plan, number), share) for number in range(1, len(worse) + 1)]
    unread: deque[list[tuple[_Candidate, UnitReading]]] = deque()
    for number in range(sessions):
        slot, offset = divmod(chance.random(), block)
        compared = [one for one in candidates if not one.out and offset < one.share]
        unit = f"{number:06}"
        read: list[tuple[_Candidate, UnitReading]] = []
        if int(slot) == plan.slots:
            read = [(one, _reading(chance, unit, SUCCESS, candidate=False)) for one in compared[:1]]
            read += [(one, read[0][1]) for one in compared[1:]]
        elif int(slot) < len(candidates) and candidates[int(slot)] in compared:
            mine = candidates[int(slot)]
            mine.met += 1
            read = [(mine, _reading(chance, unit, SUCCESS - worse[int(slot)], candidate=True))]
        unread.append(read)
        if len(unread) > _LAG:
            _read(unread.popleft())
            if plan.split == "adaptive":
                _move(plan, candidates, share)
            if promotes and number % _EVERY_UNITS == 0 and any(map(_good_enough, candidates)):
                break
    units = [one.evidence.units for one in candidates]
    return Played([one.out for one in candidates], [one.met for one in candidates], units)


def _reading(chance: random.Random, unit: str, likely: float, *, candidate: bool) -> UnitReading:
    values = {"missing": float(chance.random() < 0.05)}
    if not values["missing"]:
        values["reward"] = float(chance.random() < likely)
    return UnitReading(Unit(unit, candidate, BEGAN + timedelta(seconds=int(unit))), values)


def _read(readings: Sequence[tuple[_Candidate, UnitReading]]) -> None:
    for one, reading in readings:
        if not one.out:
            one.evidence.take("maturity", reading)
            one.out = bool(one.evidence.findings(numbers=False).harmed)


def _good_enough(one: _Candidate) -> bool:
    found = one.evidence.findings(numbers=False)
    return not one.out and bool(found.shown) and not found.open_guardrails


def _move(plan: RolloutPlan, candidates: Sequence[_Candidate], share: float) -> None:
    """As `Conductor` does."""
    here = {str(place): one for place, one in enumerate(candidates) if not one.out}
    due = [one for one in here.values() if one.evidence.units - one.moved_at >= _EVERY_UNITS]
    if not due:
        return
    chances = probabilities_of_best({name: one.evidence.estimate() for name, one in here.items()}, 0.1)
    for name, part in parts(chances, plan.floor).items():
        if here[name] in due:
            here[name].share = share * float(part)
            here[name].moved_at = here[name].evidence.units


def measure(runs: int, seed: int) -> dict[str, dict[str, float | None]]:
    """Equal candidates: how many are taken back. One that is equal beside two that are worse: who met which."""
    found: dict[str, dict[str, float | None]] = {}
    for split in ("even", "adaptive"):
        plan = plan_of(split)
        equal = [play_one(plan, (0.0, 0.0, 0.0), seed + run) for run in range(runs)]
        mixed = [play_one(plan, (0.0, 0.1, 0.2), seed + 100_000 + run, promotes=True) for run in range(runs)]
        found[split] = {
            "equal_rolled_back": _mean([flag for one in equal for flag in one.rolled_back]),
            "equal_beside_worse_rolled_back": _mean([one.rolled_back[0] for one in mixed]),
            "10_points_worse_rolled_back_before": _mean([one.rolled_back[1] for one in mixed]),
            "20_points_worse_rolled_back_before": _mean([one.rolled_back[2] for one in mixed]),
            "sessions_that_met_the_equal_one": _mean([one.met[0] for one in mixed]),
            "sessions_that_met_10_points_worse": _mean([one.met[1] for one in mixed]),
            "sessions_that_met_20_points_worse": _mean([one.met[2] for one in mixed]),
        }
    return found


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)
