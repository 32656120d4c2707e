"""Rollouts of several candidates with an adaptive split, computed with the registry's own statistics and rule.

Users arrive one by one at random positions of `headrace_schemas.rules.assignment`. Sessions of each candidate and its
control are read some arrivals later, and after every 20 readings of a candidate its share may change. A harmful
candidate is rolled back, and its block returns to the champion. To count errors, no candidate is promoted and all
rollouts continue to the end. To count exposure, the first candidate that is good enough ends the rollout.

`Ramp` computes the share of all traffic that a candidate gets, stage by stage, until its rollback. The comparison uses
sessions of candidate and control only. Other sessions are computed from the share: n sessions of both arms at the share
s are n / 2s sessions of users. A stage ends by the registry's rule: enough mature units, enough units with a value in
each arm, and the loss ruled out that the next share would risk.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import numpy as np

from benchmarks._rollout_trials import NEVER, Crossings
from benchmarks._rollout_worlds import Floats, World
from headrace_registry.rollouts.adaptive_split import probabilities_of_best, share_parts
from headrace_registry.rollouts.evidence import Evidence
from headrace_registry.rollouts.plan import Guardrail, RolloutPlan, RolloutStage, Unit, UnitReading

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
SUCCESS = 0.7
SESSIONS = 2400
_LAG = 40
"""Arrivals between a session and its reading."""
_EVERY_UNITS = 20


def plan_of(split: str) -> RolloutPlan:
    """Return a plan with the default guardrails on rewards, one stage and one reading."""
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
class PlayedRollout:
    """Result of one rollout of several candidates, by candidate."""

    rolled_back: list[bool]
    met: list[int]
    """Number of sessions that each candidate answered."""
    read: list[int]
    """Number of units of each candidate and its control that were read."""


@dataclass
class _Candidate:
    evidence: Evidence
    share: float
    met: int = 0
    moved_at: int = 0
    out: bool = False


def play_one(
    plan: RolloutPlan, worse: Sequence[float], seed: int, sessions: int = SESSIONS, *, promotes: bool = False
) -> PlayedRollout:
    """Play one rollout. `worse` is how much less probable a success is with each candidate than with the champion."""
    chance = random.Random(seed)
    block = 1.0 / (plan.slots + 1)
    share = float(plan.stages[0].share)
    candidates = [_Candidate(Evidence(plan, number), share) for number in range(1, len(worse) + 1)]
    unread: deque[list[tuple[_Candidate, UnitReading]]] = deque()
    for number in range(sessions):
        slot, offset = divmod(chance.random(), block)
        compared = [candidate for candidate in candidates if not candidate.out and offset < candidate.share]
        unit = f"{number:06}"
        read: list[tuple[_Candidate, UnitReading]] = []
        if int(slot) == plan.slots:
            read = [(candidate, _reading(chance, unit, SUCCESS, candidate=False)) for candidate in compared[:1]]
            read += [(candidate, read[0][1]) for candidate in compared[1:]]
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
    return PlayedRollout(
        rolled_back=[candidate.out for candidate in candidates],
        met=[candidate.met for candidate in candidates],
        read=[candidate.evidence.units for candidate in candidates],
    )


def _reading(chance: random.Random, unit: str, likely: float, *, candidate: bool) -> UnitReading:
    values = {"missing": float(chance.random() < 0.05)}
    if not values["missing"]:
        values["reward"] = float(chance.random() < likely)
    return UnitReading(Unit(unit, candidate, BEGAN + timedelta(seconds=int(unit))), values)


def _read(readings: Sequence[tuple[_Candidate, UnitReading]]) -> None:
    for candidate, reading in readings:
        if not candidate.out:
            candidate.evidence.add_reading("maturity", reading)
            candidate.out = bool(candidate.evidence.findings(numbers=False).harmed)


def _good_enough(candidate: _Candidate) -> bool:
    findings = candidate.evidence.findings(numbers=False)
    return not candidate.out and bool(findings.successes) and not findings.open_guardrails


def _move(plan: RolloutPlan, candidates: Sequence[_Candidate], share: float) -> None:
    """Move the shares as `RolloutController` does."""
    active = {str(number): candidate for number, candidate in enumerate(candidates) if not candidate.out}
    movable = [
        candidate for candidate in active.values() if candidate.evidence.units - candidate.moved_at >= _EVERY_UNITS
    ]
    if not movable:
        return
    chances = probabilities_of_best({name: candidate.evidence.estimate() for name, candidate in active.items()}, 0.1)
    for name, part in share_parts(chances, plan.floor).items():
        if active[name] in movable:
            active[name].share = share * float(part)
            active[name].moved_at = active[name].evidence.units


def measure(runs: int, seed: int) -> dict[str, dict[str, float | None]]:
    """Return the rollback rates of equal candidates, and the exposure of an equal candidate next to two worse ones."""
    report: dict[str, dict[str, float | None]] = {}
    for split in ("even", "adaptive"):
        plan = plan_of(split)
        equal = [play_one(plan, (0.0, 0.0, 0.0), seed + run) for run in range(runs)]
        mixed = [play_one(plan, (0.0, 0.1, 0.2), seed + 100_000 + run, promotes=True) for run in range(runs)]
        report[split] = {
            "equal_rolled_back": _mean([flag for rollout in equal for flag in rollout.rolled_back]),
            "equal_beside_worse_rolled_back": _mean([rollout.rolled_back[0] for rollout in mixed]),
            "10_points_worse_rolled_back_before": _mean([rollout.rolled_back[1] for rollout in mixed]),
            "20_points_worse_rolled_back_before": _mean([rollout.rolled_back[2] for rollout in mixed]),
            "sessions_that_met_the_equal_one": _mean([rollout.met[0] for rollout in mixed]),
            "sessions_that_met_10_points_worse": _mean([rollout.met[1] for rollout in mixed]),
            "sessions_that_met_20_points_worse": _mean([rollout.met[2] for rollout in mixed]),
        }
    return report


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


@dataclass(frozen=True)
class Ramp:
    """Stages by rollout."""

    begins: np.ndarray
    """First session of both arms with the share of the stage, by stage and rollout; `NEVER` if there is none."""
    candidates: np.ndarray
    shares: Floats

    def exposed(self, until: np.ndarray) -> Floats:
        """Return the share of all sessions that met the candidate in its first `until` sessions of both arms; NaN
        without sessions."""
        horizon, runs = self.candidates.shape
        everybody = np.zeros(runs)
        for stage, share in enumerate(self.shares):
            last = stage + 1 == len(self.shares)
            end = until if last else np.minimum(until, self.begins[stage + 1])
            everybody += np.maximum(end - self.begins[stage], 0) / (2 * share)
        is_rolled_back = (until > 0) & (until <= horizon)
        met = np.full(runs, np.nan)
        met[is_rolled_back] = (
            self.candidates[until[is_rolled_back] - 1, np.flatnonzero(is_rolled_back)] / everybody[is_rolled_back]
        )
        return met


def ramp(crossings: Crossings, plan: RolloutPlan, world: World) -> Ramp:
    """Return where each stage begins. Sessions that began before a reading are younger than the reading."""
    horizon, runs = crossings.candidates.shape
    lag = round(plan.maturity_s / world.every_s)
    begins = np.full((len(plan.stages), runs), NEVER)
    begins[0] = 0
    for number, stage in enumerate(plan.stages[:-1]):
        enough = _first_with(crossings.candidates, stage.units_min)
        enough_values = _first_with(crossings.valued, stage.units_min)
        left = np.max([enough, enough_values, crossings.entries[number + 1], begins[number]], axis=0)
        begins[number + 1] = np.where(left < horizon, left + 1 + lag, NEVER)
    return Ramp(begins, crossings.candidates, np.array([float(stage.share) for stage in plan.stages]))


def _first_with(counts: np.ndarray, minimum: int) -> np.ndarray:
    """Return the first session, from 0, after which the count is reached; `NEVER` if it never is."""
    reached = counts >= minimum
    return np.where(reached.any(axis=0), reached.argmax(axis=0), NEVER)
