"""Feedback finds its trajectory by turn or by session, in any order, and the newest word is valid (P10, pitfall 27)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Feedback
from headrace_scorer.feedback_matching import (
    ClosedTrajectory,
    FeedbackSet,
    PlacedFeedback,
    displaced,
    feedback_for,
    target_trajectories,
    with_task,
)
from tests.support.streams import START
from tests.support.turns import ask, feedback, user


def closed(name: str, began: int | None, at: float = 0.0, offset: int = 0) -> ClosedTrajectory:
    return ClosedTrajectory(name, epoch_ms(START) + round(at * 1000), offset, began)


def word(
    event: Feedback, offset: int = 0, turns_until: int | None = None, trajectories_until: int | None = None
) -> PlacedFeedback:
    return PlacedFeedback(event, offset, turns_until, trajectories_until)


def feedback_set(*listing: Feedback, general: tuple[Feedback, ...] = ()) -> FeedbackSet:
    """Return the feedback set, with general feedback first, each group in the order of the arguments."""
    everything = [word(item, index) for index, item in enumerate((*general, *listing))]
    lists = [item for item in everything if item.event.msg_ids]
    return feedback_for("t", [closed("t", 0)], lists, [item for item in everything if not item.event.msg_ids])


TWO = [closed("first", 10, at=1), closed("second", 20, at=2)]


def test_feedback_about_a_session_means_what_had_begun_last() -> None:
    for clock in (0.0, 1.5, 9.0):
        event = feedback(at=clock)
        assert target_trajectories(word(event, turns_until=11), TWO) == {"first"}
        assert target_trajectories(word(event, turns_until=20), TWO) == {"first"}, "the second began after it was given"
        assert target_trajectories(word(event, turns_until=21), TWO) == {"second"}


def test_else_it_means_what_began_first() -> None:
    assert target_trajectories(word(feedback(), turns_until=5), TWO) == {"first"}
    assert target_trajectories(word(feedback(), turns_until=5), []) == frozenset()


def test_what_is_closed_together_is_meant_together() -> None:
    peers = [closed("a", 1, at=10), closed("b", 3, at=10), closed("c", 20, at=20)]
    assert target_trajectories(word(feedback(), turns_until=2), peers) == {"a", "b"}


def test_what_was_ingested_began_when_it_was_sent() -> None:
    peers = [closed("first", None, at=1, offset=4), closed("second", None, at=2, offset=9)]
    assert target_trajectories(word(feedback(), turns_until=0, trajectories_until=5), peers) == {"first"}
    assert target_trajectories(word(feedback(), turns_until=0, trajectories_until=10), peers) == {"second"}


def test_what_was_ingested_counts_as_later_than_what_the_gateway_saw_begin() -> None:
    peers = [closed("sampled", 3, at=1), closed("ingested", None, at=2, offset=0)]
    assert target_trajectories(word(feedback(), turns_until=4, trajectories_until=1), peers) == {"ingested"}
    assert target_trajectories(word(feedback(), turns_until=4, trajectories_until=0), peers) == {"sampled"}
    assert target_trajectories(word(feedback(), turns_until=4), peers) == {"sampled"}
    assert target_trajectories(word(feedback(), turns_until=0, trajectories_until=0), peers) == {"sampled"}, (
        "nothing had begun"
    )


def test_what_no_gateway_stamped_has_only_its_time() -> None:
    assert target_trajectories(word(feedback(at=1)), TWO) == {"first"}, "it came as that was closed"
    assert target_trajectories(word(feedback(at=1.5)), TWO) == {"second"}
    assert target_trajectories(word(feedback(at=3)), TWO) == {"second"}
    assert target_trajectories(word(feedback(at=0.5)), TWO) == {"first"}


def test_a_new_trajectory_may_take_over_what_was_said() -> None:
    late = word(feedback(), turns_until=21)
    assert displaced("second", TWO, [late]) == ["first"]
    assert displaced("second", TWO, [word(feedback(), turns_until=15)]) == []


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True), st.integers(0, 40))
def test_displacement_is_the_difference_that_a_trajectory_makes(begins: list[int], until: int) -> None:
    peers = [closed(str(n), began, at=n) for n, began in enumerate(begins)]
    record = word(feedback(), turns_until=until)
    before, after = target_trajectories(record, peers[:-1]), target_trajectories(record, peers)
    assert displaced(peers[-1].trajectory_id, peers, [record]) == sorted(before - after)


def test_facts_and_names_of_feedback_go_before_those_of_the_trajectory() -> None:
    turn = ask([user("q")])
    fact = feedback("s", turn, value=None, context={"expected": "x"}, task_id="task")
    assert feedback_set(fact).context({"expected": "old", "kept": 1}) == {"expected": "x", "kept": 1}
    assert feedback_set(fact).named("task_id", "old") == "task"


def test_what_is_said_of_a_task_comes_first_and_counts_least() -> None:
    task = feedback("any", value=0.0, level="task", task_id="t", context={"expected": "x", "of": "task"})
    of_session = feedback(value=1.0, context={"expected": "y"})
    combined = with_task(feedback_set(general=(of_session,)), [word(task, 99)])
    assert combined.all == (task, of_session)
    assert (combined.of_task, combined.general, combined.listing) == ((task,), (of_session,), ())
    assert combined.context({}) == {"expected": "y", "of": "task"}


def test_names_come_from_the_list_then_the_trajectory_then_the_session() -> None:
    general = feedback(task_id="session", at=-1)
    assert feedback_set(general=(general,)).named("task_id", "own") == "own"
    assert feedback_set(general=(general,)).named("task_id", None) == "session"
    assert feedback_set().named("task_id", None) is None


def test_a_run_over_several_sessions_has_as_many_parts() -> None:
    first, there = ask([user("q")], session="here"), ask([user("q")], session="there")
    assert feedback_set(feedback("here", first, there)).parts == 2
    assert feedback_set(feedback("here", first)).parts == feedback_set().parts == 1
