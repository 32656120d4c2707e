"""Tests of small runs of the benchmarks `rollout` and `shadow`.

The `rollout` benchmark simulates 1,000 canaries of two equal versions and looks at the interval after each session. The
`shadow` benchmark simulates two policies. The pass criteria of both must hold for correct results and fail for wrong
ones.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from benchmarks._rollout_adaptive import Ramp, plan_of, play_one
from benchmarks._rollout_trials import NEVER, play
from benchmarks._rollout_worlds import World
from benchmarks._shadow_canaries import TASKS, canaries, far, near, sample, shadows
from benchmarks.rollout import CASES, COVERED_MIN, LOST, NULLS, RATIO_MAX, ROLLED_BACK_MAX, Numbers, failures, of_case
from benchmarks.shadow import Numbers as ShadowNumbers
from benchmarks.shadow import as_pairs, of_canaries, of_estimates
from benchmarks.shadow import failures as shadow_failures
from headrace_registry.rollouts.estimate import EstimateRequirements, estimate
from headrace_registry.rollouts.plan import RolloutPlan


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
