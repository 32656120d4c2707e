"""Tests of feedback over HTTP: the sessions and turns that it applies to, and its validation.

The rules for HTTP bodies also hold for records of the topic.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace_gateway.access.keys import ALL_SCOPES, Caller
from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests.feedback import events_of, turns_by_session
from headrace_gateway.requests.feedback_request import FeedbackRequest
from headrace_gateway.settings import LimitSettings
from headrace_schemas import Feedback
from headrace_schemas.events.feedback import task_key
from headrace_schemas.values import ids
from headrace_schemas.values.errors import InvalidEvent
from tests.support.gateway import PARTITIONS, Gateway, gateway
from tests.support.streams import ManualClock

OWN, OTHER = ids.session_key("t", "own"), ids.session_key("t", "other")


def test_a_named_session_keeps_its_own_turns_and_comes_first() -> None:
    mine, other_id = ids.response_id(OWN), ids.response_id(OTHER)
    assert list(turns_by_session("t", "own", (other_id, mine)).items()) == [(OWN, [mine]), (OTHER, [other_id])]


def test_an_id_that_is_not_ours_belongs_to_the_session_that_is_named() -> None:
    other_id = ids.response_id(OTHER)
    assert turns_by_session("t", "own", (other_id, "strange")) == {OWN: ["strange"], OTHER: [other_id]}
    assert turns_by_session("t", "own", (other_id,)) == {OTHER: [other_id]}, "of the named session nothing is listed"


def test_without_ids_the_session_is_meant() -> None:
    assert turns_by_session("t", "own", ()) == {OWN: []}


def test_each_turn_is_listed_once() -> None:
    turn = ids.response_id(OTHER)
    assert turns_by_session("t", None, (turn, turn)) == {OTHER: [turn]}


def test_strange_ids_without_a_session_are_kept_together_under_the_first() -> None:
    assert turns_by_session("t", None, ("b", "c", "a")) == {ids.session_key("t", "unknown-b"): ["b", "c", "a"]}


def feedback_of_size(growth_max: float, body_bytes: int, sessions: int = 4, **fields: Any) -> list[Feedback]:
    turns = tuple(ids.response_id(ids.session_key("t", str(number))) for number in range(sessions))
    request = FeedbackRequest(msg_ids=turns, value=1, feedback_id="f", **fields)
    caller = Caller("k", "k", "t", ALL_SCOPES, None, LimitSettings())
    with mock.patch("headrace_gateway.requests.feedback.GROWTH_MAX", growth_max):
        return events_of(request, caller, ManualClock(), body_bytes)


def test_copies_may_be_as_large_as_allowed_to_the_byte() -> None:
    """The size limit counts 300 bytes for the envelope of each event."""
    size = sum(len(event.to_json()) + 300 for event in feedback_of_size(9.0, 10_000))
    assert len(feedback_of_size(1.0, size)) == 4
    with pytest.raises(ApiError) as refused:
        feedback_of_size(1.0, size - 1)
    assert (refused.value.status, refused.value.param) == (413, "context")


def test_a_small_request_may_become_what_one_of_a_kilobyte_may() -> None:
    size = sum(len(event.to_json()) + 300 for event in feedback_of_size(9.0, 10_000))
    assert len(feedback_of_size(size / 1024, 0)) == 4
    with pytest.raises(ApiError):
        feedback_of_size((size - 1) / 1024, 0)


def test_what_is_said_about_one_session_needs_no_copies() -> None:
    assert len(feedback_of_size(1.0, 1, sessions=1, comment="x" * 4000)) == 1
    with pytest.raises(ApiError, match="a copy for each of 2 sessions"):
        feedback_of_size(1.0, 1, sessions=2, comment="x" * 4000)


ONE, TWO = (ids.session_key("default", name) for name in ("one", "two"))
A, B, C = (f"chatcmpl-{key}-01a2060cb1cc7c47a82c2578b756ac0{n}" for n, key in enumerate((ONE, ONE, TWO)))
"""Response ids, which are the same in every process that collects these tests."""


async def sent(served: Gateway, body: dict[str, Any]) -> list[Feedback]:
    answer = await served.client.post("/v1/feedback", json=body)
    assert answer.status_code == 202, answer.text
    return served.bus.events(Feedback)


ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"session_id": "one", "value": True}, {"value": 1.0}),
    ({"session_id": "one", "value": False}, {"value": 0.0}),
    ({"session_id": "one", "rating": 4, "scale": [1, 5]}, {"value": 0.75, "rating": 4.0, "scale": (1.0, 5.0)}),
    ({"session_id": "one", "label": "good"}, {"label": "good", "value": None}),
    ({"session_id": "one", "parts": {"tone": 1, "truth": 0.5}}, {"parts": {"tone": 1.0, "truth": 0.5}}),
    ({"session_id": "one", "value": 1, "metric": "tone", "rater": "ann"}, {"metric": "tone", "rater": "ann"}),
    ({"response_id": A, "value": 1}, {"level": None, "msg_ids": (A,)}),
    ({"response_id": A, "value": 1, "choice": 1}, {"level": "response", "choice": 1, "msg_ids": (A,)}),
    ({"response_id": A, "value": 1, "level": "turn"}, {"level": "turn", "msg_ids": (A,)}),
    ({"msg_ids": [A], "value": 1, "level": "session"}, {"level": "session", "msg_ids": (A,)}),
    ({"response_id": A, "withdrawn": True, "kind": "edit"}, {"withdrawn": True, "kind": "edit", "msg_ids": (A,)}),
]


@pytest.mark.parametrize(
    ("body", "expected"), ACCEPTED, ids=lambda fields: json.dumps(fields)[:60] if "value" in fields else ""
)
async def test_what_is_said_is_what_travels(tmp_path: Path, body: dict[str, Any], expected: dict[str, Any]) -> None:
    async with gateway(tmp_path) as served:
        (event,) = await sent(served, body)
        assert {name: getattr(event, name) for name in expected} == expected
        assert Feedback.from_json(event.to_json()) == event


async def test_an_edit_is_a_text_or_an_answer_with_tool_calls(tmp_path: Path) -> None:
    call = {"function": {"name": "look", "arguments": "{}"}}
    async with gateway(tmp_path) as served:
        await sent(served, {"response_id": A, "edit": "what it should have said"})
        await sent(served, {"response_id": A, "choice": 1, "edit": {"content": "so", "tool_calls": [call, call]}})
        text, calls = served.bus.events(Feedback)
        assert (text.edit and text.edit.role, text.edit and text.edit.text) == ("assistant", "what it should have said")
        assert text.answer == (A, 0)
        assert calls.answer == (A, 1)
        assert calls.edit is not None
        assert [tool_call.id for tool_call in calls.edit.tool_calls or ()] == ["call_0", "call_1"]
        assert not text.lists_a_run, "an edit of one turn does not say that this turn is a run"


async def test_a_preference_between_two_choices_of_one_call(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        (event,) = await sent(served, {"response_id": A, "preference": {"chosen": 1, "rejected": 0}})
        assert event.preference is not None
        assert event.preference.model_dump() == {
            "chosen": {"turn_id": A, "choice": 1},
            "rejected": {"turn_id": A, "choice": 0},
        }
        assert (event.msg_ids, event.sessions) == ((A,), 1)


async def test_a_preference_over_two_sessions_is_an_event_in_each(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        events = await sent(served, {"preference": {"chosen": C, "rejected": {"response_id": A, "choice": 2}}})
        assert {(event.session_key, event.msg_ids) for event in events} == {(ONE, (A,)), (TWO, (C,))}
        assert len({event.event_id for event in events}) == 2
        assert {event.preference_id("default") for event in events} == {events[0].preference_id("default")}
        assert {event.sessions for event in events} == {1}, "what is compared is not one run"


@pytest.mark.parametrize(("level", "sessions"), [(None, 2), ("turn", 1), ("session", 1)])
async def test_what_lists_responses_of_two_sessions_is_of_both_only_without_a_level(
    tmp_path: Path, level: str | None, sessions: int
) -> None:
    async with gateway(tmp_path) as served:
        events = await sent(served, {"msg_ids": [A, C], "value": 1, "level": level})
        assert [(event.session_key, event.sessions) for event in events] == [(ONE, sessions), (TWO, sessions)]


async def test_two_responses_of_one_session_are_compared_in_one_event(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        (event,) = await sent(served, {"preference": {"chosen": B, "rejected": A}})
        assert set(event.msg_ids) == {A, B}


async def test_feedback_about_a_task_reaches_every_partition(tmp_path: Path) -> None:
    async with gateway(tmp_path, limits_per_key={"requests_per_s": 0.001, "burst": 2 * PARTITIONS}) as served:
        events = await sent(served, {"level": "task", "task_id": "t", "value": 1, "context": {"expected": "42"}})
        assert [event.partition for event in events] == list(range(PARTITIONS))
        assert {event.session_key for event in events} == {task_key("default", "t")}
        assert len({event.event_id for event in events}) == PARTITIONS
        statuses = []
        for _ in range(3):
            body = {"level": "task", "task_id": "t", "value": 1}
            statuses.append((await served.client.post("/v1/feedback", json=body)).status_code)
        assert statuses[-1] == 429, "each copy is charged"


async def test_a_preference_over_two_sessions_is_charged_twice(tmp_path: Path) -> None:
    async with gateway(tmp_path, limits_per_key={"requests_per_s": 0.001, "burst": 4}) as served:
        body = {"preference": {"chosen": C, "rejected": A}}
        statuses = [(await served.client.post("/v1/feedback", json=body)).status_code for _ in range(4)]
        assert statuses[0] == 202
        assert statuses[-1] == 429


async def test_feedback_with_many_values_is_charged_for_them(tmp_path: Path) -> None:
    async with gateway(tmp_path, limits_per_key={"requests_per_s": 0.001, "burst": 100}) as served:
        turns = [ids.response_id(ONE) for _ in range(100)]
        body = {"msg_ids": turns, "level": "turn", "parts": {f"p{n}": 1 for n in range(32)}}
        statuses = [(await served.client.post("/v1/feedback", json=body)).status_code for _ in range(2)]
        assert statuses == [202, 429], "3,200 values are 3,200 rewards"


async def test_one_value_for_a_whole_run_is_charged_as_one(tmp_path: Path) -> None:
    async with gateway(tmp_path, limits_per_key={"requests_per_s": 0.001, "burst": 20}) as served:
        body = {"msg_ids": [ids.response_id(ONE) for _ in range(100)], "value": 1}
        statuses = [(await served.client.post("/v1/feedback", json=body)).status_code for _ in range(8)]
        assert statuses == [202] * 8


MANY = [ids.response_id(ids.session_key("default", "one")) for _ in range(129)]
PARTS = {f"p{n}": 1 for n in range(32)}
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"session_id": "one", "value": "0.5"}, "value", "must be a number"),
    ({"session_id": "one", "value": 1, "label": "good"}, "label", "cannot be combined with value"),
    ({"session_id": "one", "value": 1, "parts": {"tone": 1}}, "parts", "cannot be combined with value"),
    ({"session_id": "one", "rating": 4}, "scale", "is required with rating"),
    ({"session_id": "one", "scale": [1, 5], "value": 1}, "rating", "is required with scale"),
    ({"session_id": "one", "rating": 6, "scale": [1, 5]}, "rating", "6 is not on the scale from 1 to 5"),
    ({"session_id": "one", "rating": 4, "scale": [5, 1]}, "scale", "the lower end comes first"),
    ({"session_id": "one", "rating": True, "scale": [0, 1]}, "rating", "must be a number"),
    ({"session_id": "one", "value": 1, "metric": "a:b"}, "metric", "pattern"),
    ({"session_id": "one", "parts": {"tone": 1}, "metric": "tone"}, "metric", "parts name their metrics"),
    ({"session_id": "one", "edit": "x"}, "edit", "name it as response_id"),
    ({"msg_ids": [A, C], "edit": "x"}, "edit", "name it as response_id"),
    ({"response_id": A, "edit": ""}, "edit", "no text and no tool calls"),
    ({"response_id": A, "edit": {"role": "user", "content": "x"}}, "edit", "has the role 'user'"),
    ({"response_id": A, "edit": "x", "value": 0}, "edit", "cannot be combined with value"),
    ({"response_id": A, "edit": "x", "level": "turn"}, "edit", "no level except response"),
    ({"response_id": A, "edit": "x", "metric": "tone"}, "metric", "an edit has none"),
    ({"session_id": "one", "value": 1, "choice": 0}, "choice", "name it as response_id"),
    ({"msg_ids": [A, C], "value": 1, "level": "response"}, "level", "name it as response_id"),
    ({"session_id": "one", "value": 1, "level": "turn"}, "level", "at least one response"),
    ({"response_id": A, "value": 1, "level": "turn", "choice": 1}, "choice", "only allowed for the level response"),
    ({"preference": {"chosen": 1, "rejected": 0}}, "preference", "name it as response_id"),
    ({"msg_ids": [A, C], "preference": {"chosen": 1, "rejected": 0}}, "preference", "name it as response_id"),
    ({"response_id": A, "preference": {"chosen": A, "rejected": C}}, "preference", "names its responses itself"),
    ({"response_id": A, "preference": {"chosen": 1, "rejected": 1}}, "preference", "an answer with itself"),
    ({"preference": {"chosen": A, "rejected": A}}, "preference", "an answer with itself"),
    ({"preference": {"chosen": A}}, "preference.rejected", "required"),
    ({"preference": {"chosen": A, "rejected": C}, "choice": 1}, "preference", "omit level and choice"),
    ({"level": "task", "value": 1}, "task_id", "is required"),
    ({"level": "task", "task_id": "t"}, None, "feedback is empty"),
    ({"level": "task", "task_id": "t", "value": 1, "session_id": "one"}, "session_id", "name only the task"),
    ({"level": "task", "task_id": "t", "value": 1, "ends_session": True}, "level", "name only the task"),
    ({"session_id": "one", "value": 1, "kind": "edit"}, "edit", "name it as response_id"),
    ({"session_id": "one", "value": 1, "kind": "value"}, "kind", "only allowed with withdrawn"),
    ({"session_id": "one", "withdrawn": True, "label": "good"}, "label", "must be omitted from a withdrawal"),
    ({"session_id": "one", "withdrawn": True, "kind": "preference"}, "preference", "name the two answers"),
    ({"session_id": "one", "value": 1, "ratter": "ann"}, "ratter", "did you mean 'rater'"),
    ({"session_id": "one", "level": "run", "value": 1}, "level", "'turn'"),
    ({"parts": PARTS, "msg_ids": MANY}, "parts", "4128 values, more than 4096"),
    ({"level": "turn", "parts": PARTS, "msg_ids": MANY}, "parts", "set level to session"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=lambda argument: json.dumps(argument)[:70])
async def test_what_cannot_be_meant_is_refused_by_name(
    tmp_path: Path, body: dict[str, Any], param: str | None, message: str
) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/v1/feedback", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert message in error["message"]
        assert served.bus.events(Feedback) == []


def record(**fields: Any) -> bytes:
    required_fields = {"time": "2026-01-01T00:00:00Z", "feedback_id": "f", "session_key": ONE}
    return json.dumps({**required_fields, **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value": 1, "label": "good"}, "label: cannot be combined with value"),
        ({"rating": 4}, "scale: is required"),
        ({"rating": 9, "scale": [1, 5]}, "rating: 9 is not on the scale"),
        ({"rating": 4, "scale": [1, 5], "value": 0.5}, "value: must be the position of the rating"),
        ({"edit": {"role": "assistant", "content": "x"}}, "edit: must name exactly one response"),
        ({"edit": {"role": "user", "content": "x"}, "msg_ids": [A]}, "edit: has the role"),
        ({"choice": 1, "value": 1, "msg_ids": [A]}, "choice: is only allowed for the level response"),
        ({"level": "task", "value": 1}, "task_id: is required"),
        (
            {"preference": {"chosen": {"turn_id": A}, "rejected": {"turn_id": B}}, "msg_ids": [C]},
            "msg_ids: of a preference",
        ),
    ],
)
def test_the_topic_has_the_rules_of_http(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidEvent, match=message):
        Feedback.from_json(record(**fields))


def test_the_values_of_feedback_are_bounded_on_the_topic_and_at_the_bound_they_are_taken() -> None:
    with pytest.raises(InvalidEvent, match="4128 values"):
        Feedback.from_json(record(msg_ids=MANY, parts=PARTS))
    assert Feedback.from_json(record(msg_ids=MANY[1:], parts=PARTS)).value_count == 4096
    assert Feedback.from_json(record(msg_ids=MANY, parts=PARTS, level="session")).value_count == 32


def test_what_the_first_releases_sent_is_still_read() -> None:
    assert Feedback.from_json(record(value=1, withdrawn=True)).withdrawn
    old = Feedback.from_json(record(value=1, msg_ids=[A, C], task_id="t"))
    assert (old.run_sessions, old.lists_a_run, old.feedback_kind) == (2, True, "value")
