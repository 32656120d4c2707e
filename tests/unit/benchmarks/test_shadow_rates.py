"""A small `make bench NAME=shadow`: its simulated world, lines that hold, and lines that must fail."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from benchmarks._shadow_canaries import canaries, shadows
from benchmarks._shadow_worlds import TASKS, far, near, sample
from benchmarks.shadow import Numbers, as_pairs, failures, of_canaries, of_estimates
from headrace_registry.rollouts.estimate import EstimateRequirements, estimate
from headrace_registry.rollouts.plan import RolloutPlan

SOUND: dict[str, Numbers] = {
    "near": {"covered": 0.95, "ranked_right": 0.95},
    "far": {"refused": 1.0},
    "saved": {"all": 0.45},
    **{f"equal, {how}": {"rolled_back": 0.03} for how in ("with", "without")},
    **{f"10 points worse, {how}": {"promoted": 0.02} for how in ("with", "without")},
}


def test_a_tiny_model_is_one() -> None:
    """Answer probabilities add up to 1, and token logprobs to the logprob of their answer.

    The truth is the mean of many samples.
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
    assert failures(SOUND) == []


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
    assert len(failures(worse)) == 1
