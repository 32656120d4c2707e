"""Feedback finds its trajectory by turn or by session, in any order, and the newest word is valid (P10, pitfall 27)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Feedback
from headrace_scorer.joins import Closed, Said, displaced, said_about, targets, verdicts
from tests.support.streams import START
from tests.support.turns import ask, feedback, user


def closed(name: str, at: float) -> Closed:
    return Closed(name, epoch_ms(START) + round(at * 1000))


def said(*listing: Feedback, general: tuple[Feedback, ...] = ()) -> Said:
    return said_about("t", [closed("t", 0)], listing, general)


def test_feedback_about_a_session_means_what_is_closed_next() -> None:
    peers = [closed("first", 10), closed("second", 20)]
    assert targets(feedback(at=5), peers) == {"first"}
    assert targets(feedback(at=10), peers) == {"first"}
    assert targets(feedback(at=15), peers) == {"second"}


def test_else_it_means_what_was_closed_last() -> None:
    assert targets(feedback(at=30), [closed("first", 10), closed("second", 20)]) == {"second"}
    assert targets(feedback(at=30), []) == frozenset()


def test_what_is_closed_together_is_meant_together() -> None:
    assert targets(feedback(at=5), [closed("a", 10), closed("b", 10), closed("c", 20)]) == {"a", "b"}


def test_a_new_trajectory_may_take_over_what_was_said() -> None:
    late = feedback(at=15)
    assert displaced("second", [closed("first", 10), closed("second", 20)], [late]) == ["first"]
    assert displaced("second", [closed("first", 20), closed("second", 30)], [late]) == []


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 40))
def test_displacement_is_the_difference_that_a_trajectory_makes(times: list[int], at: int) -> None:
    peers = [closed(str(n), time) for n, time in enumerate(times)]
    one = feedback(at=at)
    before, after = targets(one, peers[:-1]), targets(one, peers)
    assert displaced(peers[-1].trajectory_id, peers, [one]) == sorted(before - after)


def test_the_newest_of_a_source_is_valid_whatever_came_last() -> None:
    turn = ask([user("q")])
    old, new = feedback("s", turn, value=0.0, at=1), feedback("s", turn, value=1.0, at=2)
    other = feedback("s", turn, value=0.5, at=1, source="review")
    for order in ([old, new, other], [new, other, old]):
        assert verdicts(said(*order), [turn.turn_id]) == {("", "feedback"): new, ("", "review"): other}


def test_what_lists_some_turns_is_about_those() -> None:
    a, b, c = (ask([user("q")], at=at) for at in range(3))
    some = feedback("s", a, b, value=0.5)
    spoken = [a.turn_id, b.turn_id, c.turn_id]
    assert verdicts(said(some), spoken) == {(a.turn_id, "feedback"): some, (b.turn_id, "feedback"): some}
    assert verdicts(said(some), spoken[:2]) == {("", "feedback"): some}, "all that was spoken"


def test_what_only_brings_context_is_no_verdict() -> None:
    turn = ask([user("q")])
    fact = feedback("s", turn, value=None, context={"expected": "x"}, task_id="task")
    assert verdicts(said(fact), [turn.turn_id]) == {}
    assert said(fact).context({"expected": "old", "kept": 1}) == {"expected": "x", "kept": 1}
    assert said(fact).named("task_id", "old") == "task"


def test_names_come_from_the_list_then_the_trajectory_then_the_session() -> None:
    general = feedback(task_id="session", at=-1)
    assert said(general=(general,)).named("task_id", "own") == "own"
    assert said(general=(general,)).named("task_id", None) == "session"
    assert said().named("task_id", None) is None


def test_a_run_over_several_sessions_has_as_many_parts() -> None:
    here, there = ask([user("q")], session="here"), ask([user("q")], session="there")
    assert said(feedback("here", here, there)).parts == 2
    assert said(feedback("here", here)).parts == said().parts == 1
