"""Which sessions a feedback reaches, and with which turns."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_gateway.access import ALL_SCOPES, Caller
from headrace_gateway.feedback import events_of, turns_by_session
from headrace_gateway.feedback_request import FeedbackRequest
from headrace_gateway.refusals import ApiError
from headrace_gateway.settings import FeedbackSettings, LimitSettings
from headrace_schemas import Feedback
from headrace_schemas.values import ids
from tests.support.streams import ManualClock

OWN, OTHER = ids.session_key("t", "own"), ids.session_key("t", "other")


def test_a_named_session_keeps_its_own_turns_and_comes_first() -> None:
    mine, theirs = ids.response_id(OWN), ids.response_id(OTHER)
    assert list(turns_by_session("t", "own", (theirs, mine)).items()) == [(OWN, [mine]), (OTHER, [theirs])]


def test_an_id_that_is_not_ours_belongs_to_the_session_that_is_named() -> None:
    theirs = ids.response_id(OTHER)
    assert turns_by_session("t", "own", (theirs, "strange")) == {OWN: ["strange"], OTHER: [theirs]}


def test_without_ids_the_session_is_meant() -> None:
    assert turns_by_session("t", "own", ()) == {OWN: []}


def test_each_turn_is_listed_once() -> None:
    turn = ids.response_id(OTHER)
    assert turns_by_session("t", None, (turn, turn)) == {OTHER: [turn]}


def test_strange_ids_without_a_session_are_kept_together_under_the_first() -> None:
    assert turns_by_session("t", None, ("b", "c", "a")) == {ids.session_key("t", "unknown-b"): ["b", "c", "a"]}


def said(growth_max: float, body_bytes: int, sessions: int = 4, **fields: Any) -> list[Feedback]:
    turns = tuple(ids.response_id(ids.session_key("t", str(number))) for number in range(sessions))
    request = FeedbackRequest(msg_ids=turns, value=1, feedback_id="f", **fields)
    caller = Caller("k", "k", "t", ALL_SCOPES, None, LimitSettings())
    return events_of(request, caller, ManualClock(), FeedbackSettings(growth_max=growth_max), body_bytes)


def test_copies_may_be_as_large_as_allowed_to_the_byte() -> None:
    """Each event counts with 300 bytes for its envelope."""
    size = sum(len(event.to_json()) + 300 for event in said(9.0, 10_000))
    assert len(said(1.0, size)) == 4
    with pytest.raises(ApiError) as refused:
        said(1.0, size - 1)
    assert (refused.value.status, refused.value.param) == (413, "context")


def test_a_small_request_may_become_what_one_of_a_kilobyte_may() -> None:
    size = sum(len(event.to_json()) + 300 for event in said(9.0, 10_000))
    assert len(said(size / 1024, 0)) == 4
    with pytest.raises(ApiError):
        said((size - 1) / 1024, 0)


def test_what_is_said_about_one_session_needs_no_copies() -> None:
    assert len(said(1.0, 1, sessions=1, comment="x" * 4000)) == 1
    with pytest.raises(ApiError, match="a copy for each of 2 sessions"):
        said(1.0, 1, sessions=2, comment="x" * 4000)
