"""Which sessions a feedback reaches, and with which turns."""

from __future__ import annotations

from headrace_gateway.feedback import turns_by_session
from headrace_schemas import ids

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
