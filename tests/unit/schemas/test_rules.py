"""Assignment of units to the arms of a routing's split, by the registry's own rule, with exact propensities.

A turn that extends another one is found whole again by every reader, or is refused with the earlier turn's name.
"""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import headrace_schemas
from headrace_schemas import Turn
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.rules.assignment import Split, assign_unit
from headrace_schemas.rules.turn_history import UNRESOLVED, TurnHistory, extend, token_digest
from headrace_schemas.values.errors import InvalidEvent
from tests.support.turns import after, ask, extending, said, user

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


EXAMPLES = Path(headrace_schemas.__file__).parent / "examples" / "turns"


def example(name: str) -> Turn:
    return Turn.from_json((EXAMPLES / f"{name}.json").read_bytes())


def test_example_that_extends_another_resolves() -> None:
    earlier, turn = example("tool-call"), example("extends-another")
    history = TurnHistory()
    history.whole_turn(earlier)
    resolved = history.whole_turn(turn)
    assert resolved.messages[:3] == (*earlier.messages, earlier.choices[0].message)
    assert (resolved.tools, resolved.extends) == (earlier.tools, None)
    assert len(resolved.prompt_token_ids) == resolved.usage.prompt_tokens
    assert history.whole_turn(extending(ask(after(resolved), session="order-4711"), resolved)).message_count == 5


def test_turn_written_by_an_earlier_release_is_whole() -> None:
    turn = example("tool-call")
    assert "extends" not in json.loads(turn.to_json())
    assert TurnHistory().whole_turn(turn) is turn


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"digest": token_digest([1])}, "shared token ids"),
        ({"tokens": 4_000}, "shared token ids"),
        ({"messages": 90}, "90 shared messages"),
        ({"choice": 2}, "has no choice 2"),
        ({"turn_id": "unknown"}, "was not read before"),
    ],
)
def test_reference_that_does_not_fit_is_an_error(changes: dict[str, Any], problem: str) -> None:
    first = ask([user("q")], "a")
    second = extending(ask(after(first, user("m")), "b"), first)
    assert second.extends is not None
    damaged = second.model_copy(update={"extends": second.extends.model_copy(update=changes)})
    history = TurnHistory()
    history.whole_turn(first)
    with pytest.raises(InvalidEvent, match=problem) as refusal:
        history.whole_turn(damaged)
    assert refusal.value.reason == UNRESOLVED
    assert history.whole_turn(second).messages == (*first.messages, first.choices[0].message, user("m")), "others go on"


def test_turn_of_another_session_is_no_history() -> None:
    first = ask([user("q")], "a", session="one")
    second = extending(ask([user("q"), said("a"), user("m")], "b", session="two"), first)
    history = TurnHistory()
    history.whole_turn(first)
    with pytest.raises(InvalidEvent, match="not read before"):
        history.whole_turn(second)
    with pytest.raises(InvalidEvent, match="another turn"):
        extend(first, second)


def test_history_is_bounded_by_tokens() -> None:
    history = TurnHistory(tokens_max=1_000)
    first = ask([user("q" * 100)], "a", session="old")
    history.whole_turn(first)
    for at in range(20):
        history.whole_turn(ask([user("q" * 100)], "a", session=f"s{at}"))
    with pytest.raises(InvalidEvent, match="not read before"):
        history.whole_turn(extending(ask(after(first, user("m")), session="old"), first))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 2}}, "10 shared and 3 prompt ids, usage says 5"),
        ({"tools": [{"type": "function", "function": {"name": "other"}}]}, "must not contain tools"),
    ],
)
def test_p2_turn_that_contradicts_its_reference_is_invalid(changes: dict[str, Any], problem: str) -> None:
    fields = json.loads((EXAMPLES / "extends-another.json").read_text())
    with pytest.raises(InvalidEvent, match=problem):
        Turn.from_json(json.dumps(fields | changes).encode())


def test_turn_does_not_extend_itself() -> None:
    fields = json.loads((EXAMPLES / "extends-another.json").read_text())
    fields["extends"]["turn_id"] = fields["turn_id"]
    with pytest.raises(InvalidEvent, match="the turn itself"):
        Turn.from_json(json.dumps(fields).encode())
