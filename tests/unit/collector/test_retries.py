"""An SDK's retry credits one answer; parallel samples with the same prompt all count (pitfalls 20 and 21)."""

from __future__ import annotations

from typing import Any

from headrace_collector.facts import turn_facts
from headrace_collector.retries import superseded_turns
from headrace_schemas import Turn
from tests.support.turns import START, after, ask, user


def call(reply: str = "x", **fields: Any) -> Turn:
    return ask([user("q")], reply, **fields)


def superseded_ids(*turns: Turn) -> dict[str, str]:
    """Return the superseded turns, captured in the order of their times."""
    return superseded_turns([turn_facts(turn, START, round(turn.time.timestamp() * 1000)) for turn in turns])


def test_pitfall_21_parallel_samples_are_not_superseded() -> None:
    assert superseded_ids(call(at=0), call(at=0), call(at=1)) == {}


def test_pitfall_20_retry_supersedes_a_timed_out_turn() -> None:
    first, retry = call(at=0, delivered=False), call(at=5, retry=1)
    assert superseded_ids(retry, first) == {first.turn_id: retry.turn_id}


def test_retry_supersedes_an_answer_lost_on_its_way() -> None:
    first, retry = call(at=0), call(at=5, retry=1)
    assert superseded_ids(first, retry) == {first.turn_id: retry.turn_id}


def test_repeated_retries_leave_the_last_turn() -> None:
    first, second, third = call(at=0), call(at=5, retry=1), call(at=9, retry=2)
    assert superseded_ids(third, first, second) == {first.turn_id: second.turn_id, second.turn_id: third.turn_id}


def test_retry_supersedes_one_of_several_parallel_samples() -> None:
    a, lost, b = call("a", at=0), call("b", at=1, delivered=False), call("c", at=2)
    retry = call("d", at=5, retry=1)
    assert superseded_ids(a, lost, b, retry) == {lost.turn_id: retry.turn_id}


def test_continued_answer_is_not_superseded() -> None:
    used = call("a", at=0)
    retry = call("b", at=5, retry=1)
    goes_on = ask(after(used, user("more")), at=6)
    assert superseded_ids(used, retry, goes_on) == {}, "what the retry repeats failed before it gave an answer"


def test_equal_answer_to_the_retry_supersedes_the_first() -> None:
    first, retry = call("same", at=0), call("same", at=5, retry=1)
    goes_on = ask(after(retry, user("more")), at=6)
    assert superseded_ids(first, retry, goes_on) == {first.turn_id: retry.turn_id}


def test_different_request_is_not_a_retry() -> None:
    other = ask([user("other")], at=0, delivered=False)
    assert superseded_ids(other, call(at=5, retry=1)) == {}


def test_uncounted_retry_supersedes_an_undelivered_turn() -> None:
    first = call("a", at=0, delivered=False)
    retry = call("b", at=5, repeats=first.turn_id)
    assert superseded_ids(retry, first) == {first.turn_id: retry.turn_id}


def test_uncounted_retry_supersedes_a_delivered_answer_only_once_the_client_uses_its_own() -> None:
    first = call("a", at=0)
    retry = call("b", at=5, repeats=first.turn_id)
    goes_on = ask(after(retry, user("more")), at=6)
    used = ask(after(first, user("more")), at=6)
    assert superseded_ids(first, retry) == {}, "two samples, one after the other"
    assert superseded_ids(first, retry, goes_on) == {first.turn_id: retry.turn_id}
    assert superseded_ids(first, retry, used) == superseded_ids(first, retry, used, goes_on) == {}


def test_repeated_request_of_an_unnamed_session_is_another_user() -> None:
    first = call("a", at=0, session_source="implicit")
    retry = call("b", at=5, session_source="implicit", repeats=first.turn_id)
    goes_on = ask(after(retry, user("more")), at=6, session_source="implicit")
    assert superseded_ids(first, retry, goes_on) == {}


def test_repeated_turn_of_another_request_or_session_is_not_superseded() -> None:
    first = ask([user("p")], "a", at=0, delivered=False)
    assert superseded_ids(first, call("b", at=5, repeats=first.turn_id), call("c", repeats="unknown")) == {}
