"""Tests of the adaptive split, of the assignment to versions, and of `make check NAME=rollouts`.

The split is tested by its probabilities of being best, its shares and its unbiased comparison. The assignment of units
is stable, has the planned shares, and gives each candidate a control. The check detects injected faults.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.rollouts.adaptive_split import Estimate, probabilities_of_best, share_parts
from headrace_registry.rollouts.plan import RolloutStage
from headrace_schemas import ModelEvent, RolloutStep, Routing, ServedVersion
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.rules.assignment import Allotment, Split, assign_unit, unit_position
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import BlobRef
from tests.rollouts import checks
from tests.rollouts.checks import Call, key_of
from tests.unit.registry.rig import Rig
from tests.unit.registry.rollout_traffic import Traffic, canary_settings, under_way


def test_probabilities_of_best_match_the_difference_of_two_normals() -> None:
    """P(X > Y) = Φ((m - n) / √(s² + t²)), after prior and observations are combined by their precisions."""
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
    monkeypatch.setattr(steps_of_rollouts, "new_salt", lambda: "salt")
    stages = (RolloutStage(share=Fraction(1, 4), units_min=2000),)
    async with Rig(
        data_dir, settings=canary_settings(stages=stages, slots=2, split="adaptive", floor=Fraction(1, 8))
    ) as opened:
        yield opened


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


SPLIT = Split("rollout-1", "m@c", ("m@a", "m@b"))
SHARES = st.integers(0, 1000).map(lambda part: Fraction(part, 3000))


def test_assignment_depends_on_unit_and_salt_alone() -> None:
    """The expected position is a constant, so that no release changes the assignment."""
    code = "from headrace_schemas.rules.assignment import unit_position; print(unit_position('salt', 'session-1'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == str(unit_position("salt", "session-1")) == "13685434627358417567/18446744073709551616"
    assert unit_position("salt", "session-1") != unit_position("pepper", "session-1")


@given(unit=st.text(), first=SHARES, second=SHARES, other=SHARES)
def test_assignment_keeps_units_in_their_arm_while_the_share_grows(
    unit: str, first: Fraction, second: Fraction, other: Fraction
) -> None:
    small, large = sorted((first, second))
    before, after = {"m@a": small, "m@b": other}, {"m@a": large, "m@b": Fraction(1, 3)}
    for candidate in ("m@a", "m@b"):
        if SPLIT.assign(unit, before).version == candidate:
            assert SPLIT.assign(unit, after).version == candidate
        role = SPLIT.role(unit, candidate, before)
        assert role is None or SPLIT.role(unit, candidate, after) == role


@given(unit=st.text(), a=SHARES, b=SHARES)
def test_assignment_serves_candidates_in_their_arm_and_the_champion_in_controls(
    unit: str, a: Fraction, b: Fraction
) -> None:
    shares = {"m@a": a, "m@b": b}
    assignment = SPLIT.assign(unit, shares)
    assert assignment.propensity == {**shares, "m@c": 1 - a - b}[assignment.version]
    for candidate in shares:
        role = SPLIT.role(unit, candidate, shares)
        assert (role == "candidate") == (assignment.version == candidate)
        assert role != "control" or assignment.version == "m@c"


def test_assignment_of_other_arms_stays_when_a_version_leaves() -> None:
    alone = Split("rollout-1", "m@c", (None, "m@b"))
    third = Fraction(1, 3)
    for number in range(300):
        before = SPLIT.assign(f"u{number}", {"m@a": third, "m@b": third}).version
        after = alone.assign(f"u{number}", {"m@b": third}).version
        assert after == ("m@c" if before == "m@a" else before)


def test_assignment_gives_arms_their_shares() -> None:
    split, share = Split("s", "m@c", ("m@a",)), Fraction(1, 10)
    roles = [split.role(f"session-{number}", "m@a", {"m@a": share}) for number in range(20_000)]
    for role in ("candidate", "control"):
        assert roles.count(role) == pytest.approx(2000, abs=4 * (20_000 * 0.1 * 0.9) ** 0.5)


def test_assignment_puts_all_units_in_an_arm_at_one_half() -> None:
    split, half = Split("s", "m@c", ("m@a",)), {"m@a": Fraction(1, 2)}
    assert {split.role(f"u{number}", "m@a", half) for number in range(100)} == {"candidate", "control"}
    assert split.assign("u1", half) in (Allotment("m@a", Fraction(1, 2)), Allotment("m@c", Fraction(1, 2)))


def test_split_refuses_shares_that_leave_no_control() -> None:
    with pytest.raises(ValueError, match=r"share 2/5 of m@a: must be at most 1/3, .* 2 slots"):
        SPLIT.assign("u", {"m@a": Fraction(2, 5)})
    with pytest.raises(ValueError, match="m@x: the version has no slot"):
        SPLIT.role("u", "m@a", {"m@x": Fraction(1, 10)})
    with pytest.raises(ValueError, match="each version must occur once"):
        Split("s", "m@c", ("m@c",))


OLD, NEW = "m@0123456789abcdef", "m@fedcba9876543210"
NESTED_SPLIT = TrafficSplit(
    unit="session", salt="s", slots=1, arms=(Arm(rollout_id="r", version=NEW, slot=0, share="1/2"),)
)
_NOW = utcnow()


def routing(revision: int, **changes: Any) -> Routing:
    blob = BlobRef(uri="blob", sha256="a" * 64, size=1)
    serve = tuple(ServedVersion(version=version, manifest=blob) for version in (OLD, NEW))
    fields = {"time": _NOW, "model": "m", "revision": revision, "aliases": {"champion": OLD}, "serve": serve, **changes}
    return Routing.model_validate(fields)


ON_TRIAL = {"aliases": {"champion": OLD, "canary": NEW}, "split": NESTED_SPLIT}
PROMOTED = {"aliases": {"champion": NEW, "previous": OLD}}


def test_checks_accept_sound_histories() -> None:
    ended = routing(2, **PROMOTED), routing(2, withdrawn=(NEW,))
    for last in ended:
        assert checks.in_a_row([routing(0), routing(1, **ON_TRIAL), routing(1, **ON_TRIAL), last]) == []


@pytest.mark.parametrize(
    "last",
    [
        {**ON_TRIAL, "withdrawn": (NEW,)},
        {"aliases": {"champion": NEW, "canary": NEW}},
        {"aliases": {"champion": OLD}, "split": NESTED_SPLIT},
        {**ON_TRIAL, "serve": ()},
        {**ON_TRIAL, "split": NESTED_SPLIT.model_copy(update={"salt": "other"})},
    ],
    ids=["withdrawn with an arm", "canary and champion", "arm without canary", "not served", "other users"],
)
def test_checks_find_an_incomplete_routing(last: dict[str, Any]) -> None:
    assert checks.in_a_row([routing(0), routing(1, **ON_TRIAL), routing(2, **last)])


def test_checks_find_an_undecided_champion_and_a_withdrawal_that_ends() -> None:
    assert checks.in_a_row([routing(0), routing(1, **PROMOTED)])
    assert checks.in_a_row([routing(0), routing(1, withdrawn=(NEW,)), routing(2)])
    assert checks.in_a_row([routing(1), routing(0)])
    assert checks.in_a_row([routing(1), routing(1, **ON_TRIAL)])


def test_checks_find_a_step_decided_twice() -> None:
    def step(decision_id: str, stage: int) -> ModelEvent:
        step_event = RolloutStep(rollout_id="r", kind="advance", stage=stage, share="1/2")
        about = {"time": _NOW, "model": "m", "version": NEW, "decision": "probed", "decision_id": decision_id}
        return ModelEvent.model_validate({**about, "rollout": step_event})

    assert checks.repeated_decisions([step("a", 0), step("b", 1)]) == []
    assert checks.repeated_decisions([step("a", 1), step("b", 1)])


def test_checks_find_an_answer_of_a_withdrawn_version() -> None:
    drawn = [name for name in map(str, range(50)) if assign_unit(NESTED_SPLIT, OLD, key_of(name))[0] == NEW]
    calls = [Call(drawn[0], 1.0, 2.0, NEW), Call(drawn[1], 3.5, 4.0, OLD), Call(drawn[2], 3.9, 4.5, NEW)]
    heard_s = checks.heard_by(calls, NESTED_SPLIT, OLD, NEW, 3.0)
    assert heard_s == 4.0
    assert checks.answered_by(calls, NEW, heard_s) == [], "it began before the decision was heard"
    assert checks.answered_by([*calls, Call(drawn[0], 5.0, 6.0, NEW)], NEW, heard_s)
