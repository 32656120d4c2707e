"""Which feedback is about which run of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace_collector.facts import TurnFacts
from headrace_collector.heard import Heard
from headrace_collector.listings import Listing
from headrace_collector.runs import Run
from headrace_schemas import Feedback


def listings(feedback: Sequence[Heard]) -> list[Listing]:
    return [
        Listing(frozenset(one.event.msg_ids), one.event.task_id, one.event.run_id, one.place)
        for one in feedback
        if one.event.msg_ids
    ]


def about_run(run: Run, feedback: Sequence[Heard]) -> list[Feedback]:
    """Feedback that lists turns of the run."""
    return [one.event for one in feedback if not run.turn_ids.isdisjoint(one.event.msg_ids)]


def about_session(run: Run, feedback: Sequence[Heard], began: int) -> list[Feedback]:
    """Feedback that lists nothing: it is about what had begun when it was given, or else about what came first.

    `began` is where the session's first turn ever is: no run inherits what was said about an earlier one.
    """
    return [
        one.event
        for one in feedback
        if not one.event.msg_ids and (run.place < one.turns_until or (one.turns_until <= began and run.place == began))
    ]


def used_up(feedback: Sequence[Heard], left: Sequence[Run], closed: Iterable[TurnFacts]) -> list[Feedback]:
    """What cannot be about the runs that are `left` open, nor about turns that are still to come."""
    open_turns = {turn for run in left for turn in run.turn_ids}
    known = {turn.turn_id for turn in closed}
    return [
        one.event
        for one in feedback
        if (
            open_turns.isdisjoint(one.event.msg_ids) and not known.isdisjoint(one.event.msg_ids)
            if one.event.msg_ids
            else all(run.place >= one.turns_until for run in left)
        )
    ]


def judged(feedback: Sequence[Feedback]) -> bool:
    """Whether somebody said how good it was."""
    return any(one.value is not None and not one.withdrawn for one in feedback)
