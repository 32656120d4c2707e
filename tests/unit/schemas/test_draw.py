"""Assignment of units to the arms of a routing's split, by the registry's own rule, with exact propensities."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from pydantic import ValidationError

from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.rules.assignment import Split, assign_unit

OLD, NEW, OTHER = (f"m@{digit * 16}" for digit in "123")


def split(*arms: tuple[str, int, str], slots: int = 1) -> TrafficSplit:
    arms_of_split = tuple(
        Arm(rollout_id=f"r{slot}", version=version, slot=slot, share=share) for version, slot, share in arms
    )
    return TrafficSplit(unit="session", salt="salt", slots=slots, arms=arms_of_split)


def test_a_unit_has_the_version_and_role_that_the_rule_gives_it() -> None:
    routed = split((NEW, 0, "1/10"), (OTHER, 1, "1/5"), slots=2)
    line = Split("salt", OLD, (NEW, OTHER))
    shares = {NEW: Fraction(1, 10), OTHER: Fraction(1, 5)}
    seen: Counter[str] = Counter()
    for number in range(3000):
        unit = f"unit-{number}"
        version, assignment = assign_unit(routed, OLD, unit)
        assert assignment is not None
        assert version == line.assign(unit, shares).version
        roles = {"r0": line.role(unit, NEW, shares), "r1": line.role(unit, OTHER, shares)}
        expected = {name for name, role in roles.items() if role == assignment.arm} or set(roles)
        assert set(assignment.rollouts) == expected
        assert assignment.unit == unit
        probability = {NEW: Fraction(1, 10), OTHER: Fraction(1, 5), OLD: Fraction(7, 10)}[version]
        assert Fraction(assignment.propensity) == probability
        seen[assignment.arm] += 1
    assert 750 < seen["candidate"] < 1050
    assert 450 < seen["control"] < 750, "as wide as the larger share: candidates share a control"


def test_a_candidate_that_has_become_champion_is_no_arm_any_more() -> None:
    assert assign_unit(split((NEW, 0, "1/2")), NEW, "unit") == (NEW, None)


@pytest.mark.parametrize(
    "arms",
    [
        [(NEW, 1, "1/10")],
        [(NEW, 0, "2/3")],
        [(NEW, 0, "1/10"), (OTHER, 0, "1/10")],
    ],
)
def test_a_split_that_no_gateway_could_follow_is_refused(arms: list[tuple[str, int, str]]) -> None:
    with pytest.raises(ValidationError):
        split(*arms)
