"""Error rates of canaries on live traffic, with simulated versions of known quality: `python -m benchmarks.rollout`.

The program writes `reports/bench-rollout.json`, with exit status 1 if a line does not hold. The lines, of 2,000
canaries each with the default plan, monitored after every session: without an effect at most 5 % are rolled back, in
each of four kinds of traffic. A drop of 20 points is found within 200 of the canary's sessions at p90, one of 10 points
within 700, also with rewards of 0 or 1. Until a drop of 20 points is rolled back, at most 5 % of all sessions meet it
(p90). At most 5 % of versions that are 10 points worse are promoted. Sound arms are called uneven in at most 1 %, those
of a canary that loses a third of its sessions in at least 95 %, and such a canary is promoted in at most 5 %. 95 % of
the confidence sequences contain the truth at all times. At most 5 % of equal candidates in an adaptive split are rolled
back, and fewer sessions meet a candidate that is 10 points worse, until another one is promoted, than in an even split.
The results of a z-test after each session and of a rule of five bad windows are reported for comparison. The benchmark
takes a few minutes of one core, with numpy and no model.

Rollouts of several candidates with an adaptive split are computed with the registry's own statistics and rule. Users
arrive one by one at random positions of `headrace_schemas.rules.assignment`. Sessions of each candidate and its
control are read some arrivals later, and after every 20 readings of a candidate its share may change. A harmful
candidate is rolled back, and its block returns to the champion. To count errors, no candidate is promoted and all
rollouts continue to the end. To count exposure, the first candidate that is good enough ends the rollout.

`Ramp` computes the share of all traffic that a candidate gets, stage by stage, until its rollback. The comparison uses
sessions of candidate and control only. Other sessions are computed from the share: n sessions of both arms at the share
s are n / 2s sessions of users. A stage ends by the registry's rule: enough mature units, enough units with a value in
each arm, and the loss ruled out that the next share would risk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path

import numpy as np

from benchmarks._rollout_trials import NEVER, Crossings, play
from benchmarks._rollout_worlds import Floats, World, draw_canary
from headrace_cli.terminal import ProgressDisplay
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


def measure_splits(runs: int, seed: int) -> dict[str, dict[str, float | None]]:
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


ROLLED_BACK_MAX = PROMOTED_MAX = 0.05
RATIO_MAX = 0.01
COVERED_MIN = 0.95
LOST_FOUND_MIN = 0.95
FOUND_20_MAX, FOUND_10_MAX = 200, 700
MET_MAX = 0.05
Numbers = dict[str, float | None]


@dataclass(frozen=True)
class Case:
    """A world, and the number of sessions of both arms."""

    world: World
    sessions: int


SAME = World()
BINARY = World(binary=True)
CASES = {
    "same": Case(SAME, 1400),
    "same, binary rewards": Case(BINARY, 1400),
    "same, one verdict in five revised": Case(replace(SAME, revised=0.2), 1400),
    "same, day swings by 25 points": Case(replace(BINARY, success=0.6, swing=0.25), 1400),
    "20 points worse": Case(replace(SAME, worse=0.2), 500),
    "20 points worse, binary rewards": Case(replace(BINARY, worse=0.2), 600),
    "10 points worse": Case(replace(SAME, worse=0.1), 1400),
    "10 points worse, binary rewards": Case(replace(BINARY, worse=0.1), 1800),
    "15 points more without a reward": Case(replace(SAME, missing_more=0.15), 600),
    "20 points more tool errors": Case(replace(SAME, tool_errors_more=0.2), 600),
    "5 points better": Case(replace(SAME, worse=-0.05), 1000),
    "one canary session in five lost": Case(replace(SAME, lost=0.2), 1400),
    "one canary session in three lost": Case(replace(SAME, lost=1 / 3), 1000),
}
LOST = "one canary session in three lost"
NULLS = tuple(name for name in CASES if name.startswith("same"))


def of_case(crossings: Crossings, plan: RolloutPlan, world: World) -> Numbers:
    """Return the results of canaries. Sessions are the canary's own, until the decision took effect."""
    harmed_s, safe_s = crossings.harmed_at_s(plan, world), crossings.safe_at_s(plan, world)
    uneven_s = crossings.uneven_at_s(plan, world)
    exposed = crossings.exposed(harmed_s, world)
    ramped = ramp(crossings, plan, world)
    until = np.where(np.isfinite(harmed_s), harmed_s / world.every_s + 1, 0).astype(np.int64)
    met = ramped.exposed(np.minimum(until, len(crossings.candidates)))
    last = ramped.begins[-1]
    return {
        "rolled_back": share(np.isfinite(harmed_s)),
        "promoted": share(safe_s < np.minimum(harmed_s, uneven_s)),
        "undecided": share(np.isinf(np.minimum(np.minimum(safe_s, harmed_s), uneven_s))),
        "sessions_to_rollback_p50": quantile(exposed, 0.5),
        "sessions_to_rollback_p90": quantile(exposed, 0.9),
        "sessions_to_promotion_p50": quantile(crossings.exposed(safe_s, world), 0.5),
        "met_until_rollback_p50": quantile(met[~np.isnan(met)], 0.5),
        "met_until_rollback_p90": quantile(met[~np.isnan(met)], 0.9),
        "came_to_the_last_stage": share(np.where(until > 0, last < until, last < NEVER)),
        "sessions_to_the_last_stage_p50": quantile(crossings.exposed(_at_s(last, world), world), 0.5),
        "sample_ratio_broken": share(crossings.ratio < NEVER),
        "sessions_to_sample_ratio_p90": quantile(crossings.exposed(uneven_s, world), 0.9),
        "not_covered": share(crossings.uncovered < NEVER),
        "z_test_rolled_back": share(crossings.naive_z < NEVER),
        "five_bad_windows_rolled_back": share(crossings.naive_windows < NEVER),
    }


def share(flags: np.ndarray) -> float:
    return round(float(np.mean(flags)), 4)


def quantile(values: Floats, at: float) -> float | None:
    """Return a quantile, or None if it is infinite or there are no values."""
    if not len(values):
        return None
    value = float(np.quantile(values, at, method="higher"))
    return round(value, 1 if value >= 1 else 4) if np.isfinite(value) else None


def _at_s(session: np.ndarray, world: World) -> Floats:
    return np.asarray(np.where(session < NEVER, session * world.every_s, np.inf), np.float64)


def failures(cases: Mapping[str, Numbers], splits: Mapping[str, Numbers]) -> list[str]:
    """Return the lines that do not hold."""
    at_most: dict[str, tuple[float | None, float]] = {}
    for name in NULLS:
        at_most[f"{name}: rolled back"] = cases[name]["rolled_back"], ROLLED_BACK_MAX
        at_most[f"{name}: arms called uneven"] = cases[name]["sample_ratio_broken"], RATIO_MAX
    for name, numbers in cases.items():
        at_most[f"{name}: truth left out"] = numbers["not_covered"], 1 - COVERED_MIN
    for name in ("10 points worse", "10 points worse, binary rewards", LOST):
        at_most[f"{name}: promoted"] = cases[name]["promoted"], PROMOTED_MAX
    for points, limit in ((20, FOUND_20_MAX), (10, FOUND_10_MAX)):
        for name in (f"{points} points worse", f"{points} points worse, binary rewards"):
            at_most[f"{name}: sessions to the rollback, p90"] = cases[name]["sessions_to_rollback_p90"], limit
    for name in ("20 points worse", "20 points worse, binary rewards"):
        at_most[f"{name}: part of all sessions until the rollback, p90"] = (
            cases[name]["met_until_rollback_p90"],
            MET_MAX,
        )
    for name in ("equal_rolled_back", "equal_beside_worse_rolled_back"):
        at_most[f"adaptive split: {name}"] = splits["adaptive"][name], ROLLED_BACK_MAX
    worse = "sessions_that_met_10_points_worse"
    at_most[f"adaptive split: {worse}"] = splits["adaptive"][worse], splits["even"][worse] or 0.0
    lost = cases[LOST]["sample_ratio_broken"]
    at_most[f"{LOST}: not noticed"] = 1 - (lost or 0.0), 1 - LOST_FOUND_MIN
    return [
        f"{name}: {'never' if value is None else f'{value:g}'}, at most {limit:g}"
        for name, (value, limit) in at_most.items()
        if value is None or value > limit + 1e-9
    ]


def measure(plan: RolloutPlan, runs: int, seed: int) -> dict[str, Numbers]:
    report: dict[str, Numbers] = {}
    with ProgressDisplay("bench-rollout", sum(case.sessions for case in CASES.values()), unit="sessions") as progress:
        for number, (name, case) in enumerate(CASES.items()):
            progress.update(activity=name)
            chance = np.random.default_rng([seed, number])
            crossings = play(chance, plan, case.world, case.sessions, runs, progress.advance)
            report[name] = of_case(crossings, plan, case.world)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canaries", type=int, default=2000, help="canaries of each kind (%(default)s)")
    parser.add_argument(
        "--families", type=int, default=150, help="rollouts of three candidates, for each case (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("reports/bench-rollout.json"))
    options = parser.parse_args()
    plan = RolloutPlan()
    began = time.process_time()
    cases = measure(plan, options.canaries, options.seed)
    splits = measure_splits(options.families, options.seed)
    missed = failures(cases, splits)
    report = {
        "cases": cases,
        "splits": splits,
        "families": options.families,
        "seed": options.seed,
        "canaries": options.canaries,
        "sessions_of_both_arms": {name: case.sessions for name, case in CASES.items()},
        "world": asdict(SAME),
        "plan": plan.model_dump(mode="json"),
        "cpu_s": round(time.process_time() - began, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "missed": missed,
    }
    print(json.dumps({**cases, **splits}, indent=2))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {options.out} and {draw_canary(plan, options.seed, options.out.parent / 'bench-rollout.png')}")
    for line in missed:
        print(f"does not hold: {line}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
