"""Adaptive split: probabilities of being best, shares, and an unbiased comparison."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist

import pytest
import pytest_asyncio

from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.rollouts.adaptive_split import Estimate, probabilities_of_best, share_parts
from headrace_registry.rollouts.plan import RolloutStage
from headrace_schemas import Routing
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.rules.assignment import assign_unit
from tests.unit.registry.rig import Rig
from tests.unit.registry.rollout_traffic import Traffic, canary, under_way


def test_probabilities_of_best_match_the_difference_of_two_normals() -> None:
    """P(X > Y) = Φ((m - n) / √(s² + t²)), once prior and seen are joined by their precisions."""
    probabilities = probabilities_of_best({"x": Estimate(0.06, 0.03), "y": Estimate(0.0, 0.04)}, 0.1)

    def joined(estimate: Estimate) -> tuple[float, float]:
        assert estimate.standard_error
        seen, prior = estimate.standard_error**-2, 0.1**-2
        return estimate.mean * seen / (seen + prior), 1 / (seen + prior)

    (mean, variance), (other, beside) = joined(Estimate(0.06, 0.03)), joined(Estimate(0.0, 0.04))
    expected = NormalDist().cdf((mean - other) / math.sqrt(variance + beside))
    assert probabilities["x"] == pytest.approx(expected, abs=1e-4)
    assert sum(probabilities.values()) == pytest.approx(1.0)


def test_probabilities_of_best_match_random_draws() -> None:
    seed = 11
    print(f"seed {seed}")
    estimates = {"x": Estimate(0.05, 0.05), "y": Estimate(0.0, 0.02), "z": Estimate(0.1, None)}
    probabilities = probabilities_of_best(estimates, 0.1)
    chance, wins = random.Random(seed), Counter[str]()
    beliefs = {"x": (0.04, math.sqrt(1 / 500)), "y": (0.0, math.sqrt(1 / 2600)), "z": (0.0, 0.1)}
    for _ in range(20_000):
        wins[max(beliefs, key=lambda name: chance.gauss(*beliefs[name]))] += 1
    assert all(probabilities[name] == pytest.approx(wins[name] / 20_000, abs=0.015) for name in estimates)


def test_share_parts_of_unmeasured_candidates_are_equal() -> None:
    assert share_parts(
        probabilities_of_best({"x": Estimate(0.0, None), "y": Estimate(0.0, None)}, 0.1), Fraction(1, 8)
    ) == {
        "x": 1,
        "y": 1,
    }


def test_share_parts_keep_the_leader_and_the_floor() -> None:
    assert share_parts({"x": 0.98, "y": 0.02}, Fraction(1, 8)) == {"x": 1, "y": Fraction(1, 8)}
    assert share_parts({"x": 0.5, "y": 0.25, "z": 0.25}, Fraction(1, 8)) == {
        "x": 1,
        "y": Fraction(1, 2),
        "z": Fraction(1, 2),
    }


def test_adaptive_split_gives_candidate_and_control_equal_shares() -> None:
    shares = {"m@bbbbbbbbbbbb": "1/4", "m@cccccccccccc": "1/32"}
    arms = tuple(
        Arm(rollout_id=name, version=name, slot=slot, share=share) for slot, (name, share) in enumerate(shares.items())
    )
    split = TrafficSplit(unit="session", salt="salt", slots=2, arms=arms)
    seen: Counter[tuple[str, str]] = Counter()
    for number in range(20_000):
        _, assigned = assign_unit(split, "m@aaaaaaaaaaaa", f"unit {number}")
        assert assigned is not None
        for rollout in assigned.rollouts if assigned.arm != "rest" else ():
            seen[rollout, assigned.arm] += 1
    for name, share in shares.items():
        expected = 20_000 * float(Fraction(share))
        for arm in ("candidate", "control"):
            assert abs(seen[name, arm] - expected) < 4 * math.sqrt(expected)


@pytest_asyncio.fixture
async def rig(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(steps_of_rollouts, "fresh_salt", lambda: "salt")
    stages = (RolloutStage(share=Fraction(1, 4), units_min=2000),)
    opened = Rig(data_dir, settings=canary(stages=stages, slots=2, split="adaptive", floor=Fraction(1, 8)))
    await opened.start()
    yield opened
    await opened.database.close()


@pytest.mark.long
async def test_adaptive_split_reduces_the_worse_candidate_until_it_is_alone(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    first, second = await under_way(rig, 1), await under_way(rig, 2)
    traffic = Traffic(rig, 5)
    traffic.rewards |= {first: 0.85, second: 0.55}

    def shares() -> dict[str, Fraction]:
        return {arm.version: Fraction(arm.share) for arm in traffic.split.arms}

    while shares()[second] == Fraction(1, 4):
        assert len(traffic.served) < 3000
        await traffic.sessions(40)
        await traffic.advance(61)
    assert shares()[first] == Fraction(1, 4), "the leader has all of its stage's"
    assert Fraction(1, 32) <= shares()[second] < Fraction(1, 4)
    arms = [arm for routing in rig.sent(Routing) for arm in (routing.split.arms if routing.split else ())]
    assert all(Fraction(1, 32) <= Fraction(arm.share) <= Fraction(1, 4) for arm in arms)
    while len(shares()) == 2:
        assert len(traffic.served) < 6000
        await traffic.sessions(40)
        await traffic.advance(61)
    for _ in range(4):
        await traffic.sessions(80)
        await traffic.advance(61)
    assert shares() == {first: Fraction(1, 4)}
