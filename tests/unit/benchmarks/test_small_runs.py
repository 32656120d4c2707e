"""Tests of small runs of the benchmarks `rollout` and `shadow`, and of the helpers of all benchmarks.

The `rollout` benchmark simulates 1,000 canaries of two equal versions and looks at the interval after each session. The
`shadow` benchmark simulates two policies. The pass criteria of both must hold for correct results and fail for wrong
ones. The child processes of a benchmark end when the benchmark ends. The measurement of a data directory passes within
its limits for a small model and reports a limit that is exceeded.
"""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from benchmarks._rollout_trials import NEVER, play
from benchmarks._rollout_worlds import World
from benchmarks._run_processes import Summary
from benchmarks._shadow_canaries import TASKS, canaries, far, near, sample, shadows
from benchmarks.rollout import (
    CASES,
    COVERED_MIN,
    LOST,
    NULLS,
    RATIO_MAX,
    ROLLED_BACK_MAX,
    Numbers,
    Ramp,
    failures,
    of_case,
    plan_of,
    play_one,
)
from benchmarks.shadow import Numbers as ShadowNumbers
from benchmarks.shadow import as_pairs, of_canaries, of_estimates
from benchmarks.shadow import failures as shadow_failures
from benchmarks.trainer import OVERHEAD_BYTES, Bounds, measure_disk
from headrace_operations.jobs.checks import CheckReport
from headrace_registry.rollouts.estimate import EstimateRequirements, estimate
from headrace_registry.rollouts.plan import RolloutPlan
from tests.support.processes import alive, naming, wait_until


@pytest.mark.parametrize("world", [World(), World(binary=True, revised=0.3, missing=0.2)])
def test_a_thousand_canaries_without_an_effect(world: World) -> None:
    plan, seed = RolloutPlan(), 7
    print(f"seed {seed}")
    crossings = play(np.random.default_rng(seed), plan, world, 300, 1000)
    assert np.isfinite(crossings.harmed_at_s(plan, world)).mean() <= ROLLED_BACK_MAX
    assert (crossings.ratio < NEVER).mean() <= RATIO_MAX
    assert (crossings.uncovered < NEVER).mean() <= 1 - COVERED_MIN
    assert (crossings.naive_z < NEVER).mean() > 2 * ROLLED_BACK_MAX


def test_a_drop_of_30_points_is_found_and_lost_sessions_too() -> None:
    plan, world = RolloutPlan(), replace(World(), worse=0.3, lost=0.5)
    crossings = play(np.random.default_rng(0), plan, world, 300, 100)
    numbers = of_case(crossings, plan, world)
    assert (numbers["rolled_back"], numbers["promoted"]) == (1.0, 0.0)
    assert (numbers["sample_ratio_broken"] or 0.0) > 0.95
    at_s = crossings.harmed_at_s(plan, world)
    assert (at_s >= plan.maturity_s).all()
    begun = (at_s / world.every_s).astype(int) + 1
    expected = crossings.candidates[begun - 1, np.arange(100)]
    assert (crossings.exposed(at_s, world) == expected).all()


GOOD: Numbers = {
    "rolled_back": 0.05, "promoted": 0.05, "sample_ratio_broken": 0.01, "not_covered": 0.05,
    "sessions_to_rollback_p90": 200.0, "met_until_rollback_p90": 0.05,
}  # fmt: skip


SPLITS: dict[str, Numbers] = {
    split: {
        "equal_rolled_back": 0.05, "equal_beside_worse_rolled_back": 0.05, "sessions_that_met_10_points_worse": 200.0,
    }
    for split in ("even", "adaptive")
}  # fmt: skip


def good() -> dict[str, Numbers]:
    cases = {name: dict(GOOD) for name in CASES}
    cases[LOST]["sample_ratio_broken"] = 0.95
    return cases


def test_lines_hold_at_their_limits() -> None:
    assert failures(good(), SPLITS) == []


@pytest.mark.parametrize(
    ("case", "number", "value", "line"),
    [
        (NULLS[-1], "rolled_back", 0.051, "day swings by 25 points: rolled back: 0.051, at most 0.05"),
        ("same", "sample_ratio_broken", 0.02, "same: arms called uneven: 0.02, at most 0.01"),
        ("5 points better", "not_covered", 0.06, "5 points better: truth left out: 0.06, at most 0.05"),
        ("10 points worse", "promoted", 0.06, "10 points worse: promoted: 0.06, at most 0.05"),
        ("20 points worse", "sessions_to_rollback_p90", 201.0, "p90: 201, at most 200"),
        ("20 points worse", "met_until_rollback_p90", 0.11, "part of all sessions until the rollback, p90: 0.11"),
        ("10 points worse", "sessions_to_rollback_p90", None, "p90: never, at most 700"),
        (LOST, "promoted", 0.06, "three lost: promoted: 0.06, at most 0.05"),
        (LOST, "sample_ratio_broken", 0.9, "not noticed: 0.1, at most 0.05"),
    ],
)
def test_each_line_fails_on_its_own(case: str, number: str, value: float | None, line: str) -> None:
    cases = good()
    cases[case][number] = value
    failed_lines = failures(cases, SPLITS)
    assert len(failed_lines) == 1
    assert line in failed_lines[0]


@pytest.mark.parametrize(
    ("number", "value"), [("equal_rolled_back", 0.06), ("sessions_that_met_10_points_worse", 201.0)]
)
def test_each_line_about_an_adaptive_split_fails_on_its_own(number: str, value: float) -> None:
    splits = {split: dict(numbers) for split, numbers in SPLITS.items()}
    splits["adaptive"][number] = value
    (failed_line,) = failures(good(), splits)
    assert failed_line.startswith(f"adaptive split: {number}: ")


def test_an_adaptive_split_takes_sessions_from_who_is_behind() -> None:
    """Compare both traffic splits by the number of sessions that a candidate serves that is 10 points worse.

    Each split runs five rollouts, which end when the candidate is promoted.
    """
    first = 5
    print(f"seeds from {first}")
    met = {"even": 0, "adaptive": 0}
    for split in met:
        for seed in range(first, first + 5):
            rollout = play_one(plan_of(split), (0.0, 0.1), seed, promotes=True)
            met[split] += rollout.met[1]
    assert met["adaptive"] < met["even"], met


def test_met_worked_by_hand() -> None:
    """The candidate served eight of sixty user sessions.

    Ten sessions in each arm are fifty user sessions at a traffic share of 1/10, and ten at a share of 1/2.
    """
    candidates = np.array([[(number + 1) * 2 // 5] for number in range(20)], np.int32)
    ramp = Ramp(np.array([[0], [10]]), candidates, np.array([0.1, 0.5]))
    assert ramp.exposed(np.array([20]))[0] == pytest.approx(8 / 60)
    assert ramp.exposed(np.array([5]))[0] == pytest.approx(2 / 25)
    assert np.isnan(ramp.exposed(np.array([0]))[0])


SOUND: dict[str, ShadowNumbers] = {
    "near": {"covered": 0.95, "ranked_right": 0.95},
    "far": {"refused": 1.0},
    "saved": {"all": 0.45},
    **{f"equal, {how}": {"rolled_back": 0.03} for how in ("with", "without")},
    **{f"10 points worse, {how}": {"promoted": 0.02} for how in ("with", "without")},
}


def test_simulated_policies_have_consistent_probabilities() -> None:
    """The answer probabilities of a policy add up to 1, and its token logprobs to the logprob of the answer.

    The mean over many samples is close to the true difference of the two policies.
    """
    chance = np.random.default_rng(3)
    pair = near(chance, 0.1)
    for policy in (pair.champion, pair.candidate):
        assert policy.answers.sum(axis=1) == pytest.approx(np.ones(TASKS))
        assert np.log(policy.answers) == pytest.approx(policy.token_logprobs.sum(axis=2))
    assert pair.truth == pytest.approx(0.1, abs=1e-3)
    shadow_sample = sample(chance, pair, 20_000)
    feedback = shadow_sample.feedback[~np.isnan(shadow_sample.feedback)]
    assert feedback.mean() == pytest.approx(pair.by_task(pair.champion).mean(), abs=0.02)
    assert np.exp(shadow_sample.log_weight).mean() == pytest.approx(1.0, abs=0.05), "weights of overlapping versions"
    weights = np.exp(shadow_sample.log_weight)[~np.isnan(shadow_sample.feedback)]
    assert (weights * feedback).mean() == pytest.approx(pair.by_task(pair.candidate).mean(), abs=0.05)


def test_estimates_of_a_few_pairs() -> None:
    chance = np.random.default_rng(5)
    pairs = [near(chance, size) for size in (0.1, -0.1)]
    estimates = [
        estimate(as_pairs(sample(chance, pair, 300)), EstimateRequirements()) for pair in pairs for _ in range(20)
    ]
    numbers = of_estimates([pair.truth for pair in pairs for _ in range(20)], estimates)
    assert numbers["ranked_right"] >= 0.9
    assert numbers["covered"] >= 0.85
    assert estimate(as_pairs(sample(chance, far(chance), 300)), EstimateRequirements()).refused


def test_a_shadow_spares_users_a_version_that_is_worse() -> None:
    chance = np.random.default_rng(6)
    plan, pairs = RolloutPlan(shadow_units=200), [near(chance, -0.2)]
    shadow_runs = shadows(chance, plan, pairs, 10, lambda: None)
    assert shadow_runs.harmed.mean() >= 0.8
    before = of_canaries(canaries(chance, RolloutPlan(), pairs, 10, 400, None, lambda: None))
    after = of_canaries(canaries(chance, plan, pairs, 10, 400, shadow_runs, lambda: None))
    assert after["sessions_mean"] < before["sessions_mean"] / 2
    assert set(shadow_runs.expected) == {"reward", "tool_errors"}


def test_what_holds_is_not_complained_of() -> None:
    assert shadow_failures(SOUND) == []


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("near", "covered", 0.9),
        ("near", "ranked_right", 0.8),
        ("far", "refused", 0.9),
        ("saved", "all", 0.3),
        ("equal, with", "rolled_back", 0.08),
        ("10 points worse, without", "promoted", 0.06),
    ],
)
def test_each_line_can_fail(case: str, name: str, value: float) -> None:
    worse = copy.deepcopy(SOUND)
    worse[case][name] = value
    assert len(shadow_failures(worse)) == 1


ROOT = Path(__file__).resolve().parents[3]
SLOW = """
import sys, time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._run_processes import play

@dataclass(frozen=True)
class Job:
    folder: Path

    def result_file(self, parts):
        return parts / "one.json"

def work(job):
    (job.folder / "told").write_text("up")
    time.sleep(600)

if __name__ == "__main__":
    list(play("slow", [Job(Path(sys.argv[1]))], Path(sys.argv[1]) / "parts", 1, work, dict))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc to find them in")
def test_who_kills_a_benchmark_leaves_no_run_behind(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    name = f"RUN_OF_{tmp_path.name}"
    started = subprocess.Popen(
        [sys.executable, str(tmp_path / "slow.py"), str(tmp_path)],
        env={**os.environ, name: "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: (tmp_path / "told").exists() or started.poll() is not None, 60, "a run is played")
        assert len(naming(name)) > 1, "the run has a process of its own"
        started.kill()
        assert started.wait(60) == -9
        wait_until(lambda: not [pid for pid in naming(name) if alive(pid)], 30, "nothing remains")
    finally:
        started.kill()


def test_quantile_is_the_smallest_value_that_the_share_does_not_exceed() -> None:
    seed = 3
    print(f"seed {seed}")
    chance = random.Random(seed)
    for count in range(1, 203):
        summary = Summary.of([chance.random() for _ in range(count)])
        for percent in (0, 1, 50, 95, 99, 100):
            enough = [
                value
                for value in summary.values
                if sum(other <= value for other in summary.values) >= Fraction(percent, 100) * count
            ]
            assert summary.quantile(percent / 100) == min(enough), (count, percent)


def test_token_quantiles_lie_within_the_lengths() -> None:
    assert CheckReport(lengths=[]).spread() == {}
    assert CheckReport(lengths=[7]).spread() == {"least": 7, "median": 7, "95 of 100": 7, "most": 7}
    assert CheckReport(lengths=[100, 200]).spread() == {"least": 100, "median": 150, "95 of 100": 195, "most": 200}
    for count in range(1, 60):
        quantiles = list(CheckReport(lengths=[number * number for number in range(count)]).spread().values())
        assert quantiles == sorted(quantiles), f"{count} lengths"


SHAPE = {"hidden": 64, "layers": 1}


async def test_data_folder_keeps_to_its_bounds_restarts_and_rolls_back(tmp_path: Path) -> None:
    small = 1_000_000
    measured = await measure_disk(
        tmp_path, 0.0, SHAPE, Bounds(versions_bytes=small, points_bytes=small), versions_min=20
    )
    assert measured["held"]
    assert measured["bound_mb"] - OVERHEAD_BYTES / 1e6 < 6
    assert measured["peak_mb"] >= measured["end_mb"] > measured["version_mb"]
    assert measured["end_mb"] < 6, "without the room for databases, too"
    assert measured["written_mb"] > 2 * measured["end_mb"], "far more was written than is kept"
    assert measured["restarted_at_step"] == measured["versions"] - 1
    assert len(set(measured["rolled_back_to"])) == 2
