"""Which feedback is about which run of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace_collector.facts import TurnFacts
from headrace_collector.listings import Listing
from headrace_collector.runs import Run
from headrace_runtime.clock import epoch_ms
from headrace_schemas import Feedback


def listings(feedback: Sequence[Feedback]) -> list[Listing]:
    return [
        Listing(frozenset(one.msg_ids), one.task_id, one.run_id, epoch_ms(one.time), one.feedback_id)
        for one in feedback
        if one.msg_ids
    ]


def about_run(run: Run, feedback: Sequence[Feedback]) -> list[Feedback]:
    """Feedback that lists turns of the run."""
    return [one for one in feedback if not run.turn_ids.isdisjoint(one.msg_ids)]


def about_session(run: Run, feedback: Sequence[Feedback], began_ms: int) -> list[Feedback]:
    """Feedback that lists nothing: it is about what had begun when it was given, or else about what came first.

    `began_ms` is when the session's first turn ever started: no run inherits what was said about an earlier one.
    """
    times = ((one, epoch_ms(one.time)) for one in feedback if not one.msg_ids)
    return [one for one, at_ms in times if run.started_ms <= at_ms or (at_ms < began_ms and run.started_ms == began_ms)]


def used_up(feedback: Sequence[Feedback], left: Sequence[Run], closed: Iterable[TurnFacts]) -> list[Feedback]:
    """What cannot be about the runs that are `left` open, nor about turns that are still to come."""
    open_turns = {turn for run in left for turn in run.turn_ids}
    known = {turn.turn_id for turn in closed}
    return [
        one
        for one in feedback
        if (
            open_turns.isdisjoint(one.msg_ids) and not known.isdisjoint(one.msg_ids)
            if one.msg_ids
            else all(run.started_ms > epoch_ms(one.time) for run in left)
        )
    ]


def judged(feedback: Sequence[Feedback]) -> bool:
    """Whether somebody said how good it was."""
    return any(one.value is not None and not one.withdrawn for one in feedback)
