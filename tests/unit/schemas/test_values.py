"""Tests of values in events: numbers and errors of users' programs, packed arrays, assignment to rollout arms, and
turns that extend earlier turns."""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from headrace_schemas import RewardResult, Turn
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.rules.assignment import Split, assign_unit
from headrace_schemas.rules.turn_history import UNRESOLVED, TurnHistory, extend, token_digest
from headrace_schemas.values.base import Logprobs, TokenIds, pack_float32, pack_int32
from headrace_schemas.values.errors import InvalidEvent
from headrace_schemas.values.text import describe_error, plain_number, plain_value, stop_strings
from tests.support.hostile_json import event_examples
from tests.support.turns import after, ask, extending, said, user

DTYPES = [np.bool_, np.int8, np.int64, np.uint8, np.float16, np.float32, np.float64, np.longdouble]
TENSORS = [torch.bool, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def forms(number: int) -> list[Any]:
    """Return `number` in all types in which programs may return it."""
    plain: list[Any] = [number, float(number), Decimal(number), Fraction(number), bool(number)]
    arrays: list[Any] = [dtype(number) for dtype in DTYPES] + [np.array(number, dtype=dtype) for dtype in DTYPES]
    tensors: list[Any] = [torch.tensor(number, dtype=dtype) for dtype in TENSORS]
    return [*plain, *arrays, *tensors, torch.tensor(float(number), requires_grad=True)]


@pytest.mark.parametrize("number", [0, 1])
def test_every_form_of_a_number_is_taken(number: int) -> None:
    for form in forms(number):
        assert plain_number(form) == number, repr(form)
        assert RewardResult(value=form, criteria={"a": form}, turns={"t": form}).value == number
        assert plain_value(form) == number
        assert type(plain_value(form)) in (bool, int, float)


def test_random_numbers_keep_their_value() -> None:
    seed = 4
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(500):
        number = chance.uniform(-1, 1) * 10 ** chance.uniform(-6, 5)
        for form in (np.float64(number), np.array(number), torch.tensor(number, dtype=torch.float64), Decimal(number)):
            assert plain_number(form) == number


REFUSED: list[Any] = [
    "1.0", b"1", None, [], [1.0], {}, 1j, object(), np.array([1.0]), np.zeros((0,)), torch.zeros(1), torch.zeros(2, 2),
    np.str_("1"), np.array("1"), np.array(1j), np.datetime64("2026-01-01"), np.timedelta64(3, "ns"),
    np.array(None), type("Lazy", (), {"__float__": float})(),
    float("nan"), math.inf, Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Decimal(10) ** 400, 10**400,
    Fraction(10**400), np.float32("inf"), torch.tensor(math.nan), np.ma.masked,
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_single_finite_number_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        plain_number(value)


def test_no_library_is_imported() -> None:
    code = (
        "import sys; from headrace_schemas.values import text; text.plain_number(1.5);"
        "assert not {'numpy', 'torch', 'pandas', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Exiting(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class NamelessType(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        return 7  # type: ignore[return-value]


class Nameless(Exception, metaclass=NamelessType):
    pass


class NoText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad \ud83d end"), "ValueError: bad \ufffd end"),
        (ValueError("a\x00b"), "ValueError: a\ufffdb"),
        (ValueError(), "ValueError"),
        (Silent(), "Silent: (its text cannot be read: RuntimeError)"),
        (Exiting(), "Exiting: (its text cannot be read: SystemExit)"),
        (Nameless("x"), "Nameless: x"),
        (NoText(), "NoText: (its text cannot be read: TypeError)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), "UnicodeDecodeError: 'utf-8' codec"),
        (type("E" * 9999, (Exception,), {})("x"), "E" * 100 + ": x"),
    ],
)
def test_an_error_is_described_whatever_its_text_is(error: Exception, text: str) -> None:
    description = describe_error(error)
    assert description.startswith(text)
    description.encode()


def test_a_huge_error_is_cut() -> None:
    assert len(describe_error(ValueError("x" * 10**7))) < 2100


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("", None), ([], None), ("x", ("x",)), (["a", "b"], ("a", "b")), (None, None)],
)
def test_empty_stop_strings_ask_for_nothing(stop: Any, expected: Any) -> None:
    assert stop_strings(stop) == expected


IDS: TypeAdapter[tuple[int, ...]] = TypeAdapter(TokenIds)
LOGPROBS: TypeAdapter[tuple[float, ...]] = TypeAdapter(Logprobs)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=50)
logprobs = st.lists(st.floats(-(2.0**99), 0, width=32), max_size=50)


@given(ids)
def test_both_forms_of_ids_are_read_alike(values: list[int]) -> None:
    assert IDS.validate_json(json.dumps(values)) == IDS.validate_json(json.dumps(pack_int32(values))) == tuple(values)


@given(logprobs)
def test_both_forms_of_logprobs_are_read_alike(values: list[float]) -> None:
    plain = LOGPROBS.validate_json(json.dumps(values))
    packed = LOGPROBS.validate_json(json.dumps(pack_float32(values)))
    assert struct.pack(f"<{len(values)}f", *plain) == struct.pack(f"<{len(packed)}f", *packed)


@given(st.lists(st.floats(-1e30, 0), max_size=50))
def test_plain_doubles_are_rounded_once(values: list[float]) -> None:
    once = LOGPROBS.validate_python(values)
    assert LOGPROBS.validate_json(LOGPROBS.dump_json(once)) == once


def test_the_packed_form_is_little_endian() -> None:
    assert IDS.dump_json((1, 256)) == b'"AQAAAAABAAA="'


@pytest.mark.parametrize("value", ["AQ==", "no base64!", [-1], [2**31], [1.5], "/////w==", {"a": 1}])
def test_bad_ids_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        IDS.validate_python(value)


@pytest.mark.parametrize("value", [[0.5], [float("nan")], [float("-inf")], [-1e39], ["x"], pack_float32([1.0])])
def test_bad_logprobs_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        LOGPROBS.validate_python(value)


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


def example(name: str) -> Turn:
    return Turn.from_json(json.dumps(event_examples("turns")[name]).encode())


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
        ({"choice": 2}, "that turn has no choice 2"),
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
        (
            {"usage": {"prompt_tokens": 5, "completion_tokens": 2}},
            "usage.prompt_tokens = 5: must equal the 10 shared and 3 prompt ids",
        ),
        ({"tools": [{"type": "function", "function": {"name": "other"}}]}, "tools: must be empty"),
    ],
)
def test_p2_turn_that_contradicts_its_reference_is_invalid(changes: dict[str, Any], problem: str) -> None:
    fields = event_examples("turns")["extends-another"]
    with pytest.raises(InvalidEvent, match=problem):
        Turn.from_json(json.dumps(fields | changes).encode())


def test_turn_does_not_extend_itself() -> None:
    fields = event_examples("turns")["extends-another"]
    fields["extends"]["turn_id"] = fields["turn_id"]
    with pytest.raises(InvalidEvent, match="the turn itself"):
        Turn.from_json(json.dumps(fields).encode())
