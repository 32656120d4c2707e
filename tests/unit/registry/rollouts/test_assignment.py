"""Assignment of units to versions: stable, with the planned shares, and with a control for each candidate."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_schemas.rules.assignment import Allotment, Split, unit_position

SPLIT = Split("rollout-1", "m@c", ("m@a", "m@b"))
SHARES = st.integers(0, 1000).map(lambda part: Fraction(part, 3000))
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Settings without a deadline: the speed of the machine is not tested."""


def test_assignment_depends_on_unit_and_salt_alone() -> None:
    """The number was written down when this was first run."""
    code = "from headrace_schemas.rules.assignment import unit_position; print(unit_position('salt', 'session-1'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == str(unit_position("salt", "session-1")) == "13685434627358417567/18446744073709551616"
    assert unit_position("salt", "session-1") != unit_position("pepper", "session-1")


@UNHURRIED
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


@UNHURRIED
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
