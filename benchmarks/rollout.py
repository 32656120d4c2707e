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
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import _rollout_adaptive
from benchmarks._rollout_adaptive import ramp
from benchmarks._rollout_trials import NEVER, Crossings, play
from benchmarks._rollout_worlds import Floats, World, draw_canary
from headrace_cli.terminal import ProgressDisplay
from headrace_registry.rollouts.plan import RolloutPlan

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
    splits = _rollout_adaptive.measure(options.families, options.seed)
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
