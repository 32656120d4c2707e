"""`make bench NAME=shadow` in small: what its world is, that its lines hold, and that they may not."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from benchmarks._shadow_canaries import canaries, shadows
from benchmarks._shadow_worlds import TASKS, far, near, sample
from benchmarks.shadow import Numbers, as_pairs, failures, of_canaries, of_estimates
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.shadow.estimate import estimate
from headrace_registry.shadow.requirements import EstimateRequirements

SOUND: dict[str, Numbers] = {
    "near": {"covered": 0.95, "ranked_right": 0.95},
    "far": {"refused": 1.0},
    "saved": {"all": 0.45},
    **{f"equal, {how}": {"rolled_back": 0.03} for how in ("with", "without")},
    **{f"10 points worse, {how}": {"promoted": 0.02} for how in ("with", "without")},
}


def test_a_tiny_model_is_one() -> None:
    """Answers add up to one, tokens' logprobs to their answer's, and the truth is the mean of many plays."""
    chance = np.random.default_rng(3)
    pair = near(chance, 0.1)
    for policy in (pair.champion, pair.candidate):
        assert policy.answers.sum(axis=1) == pytest.approx(np.ones(TASKS))
        assert np.log(policy.answers) == pytest.approx(policy.token_logprobs.sum(axis=2))
    assert pair.truth == pytest.approx(0.1, abs=1e-3)
    found = sample(chance, pair, 20_000)
    said = found.feedback[~np.isnan(found.feedback)]
    assert said.mean() == pytest.approx(pair.by_task(pair.champion).mean(), abs=0.02)
    assert np.exp(found.log_weight).mean() == pytest.approx(1.0, abs=0.05), "weights of overlapping versions"
    weighed = np.exp(found.log_weight)[~np.isnan(found.feedback)]
    assert (weighed * said).mean() == pytest.approx(pair.by_task(pair.candidate).mean(), abs=0.05)


def test_estimates_of_a_few_pairs() -> None:
    chance = np.random.default_rng(5)
    pairs = [near(chance, size) for size in (0.1, -0.1)]
    found = [estimate(as_pairs(sample(chance, pair, 300)), EstimateRequirements()) for pair in pairs for _ in range(20)]
    numbers = of_estimates([pair.truth for pair in pairs for _ in range(20)], found)
    assert numbers["ranked_right"] >= 0.9
    assert numbers["covered"] >= 0.85
    assert estimate(as_pairs(sample(chance, far(chance), 300)), EstimateRequirements()).refused


def test_a_shadow_spares_users_a_version_that_is_worse() -> None:
    chance = np.random.default_rng(6)
    plan, pairs = RolloutPlan(shadow_units=200), [near(chance, -0.2)]
    found = shadows(chance, plan, pairs, 10, lambda: None)
    assert found.harmed.mean() >= 0.8
    before = of_canaries(canaries(chance, RolloutPlan(), pairs, 10, 400, None, lambda: None))
    after = of_canaries(canaries(chance, plan, pairs, 10, 400, found, lambda: None))
    assert after["sessions_mean"] < before["sessions_mean"] / 2
    assert set(found.expected) == {"reward", "tool_errors"}


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
