"""Which feedback is about which run of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace_collector.facts import TurnFacts
from headrace_collector.listings import Listing
from headrace_collector.ordered_feedback import OrderedFeedback
from headrace_collector.runs import SessionRun
from headrace_schemas import Feedback


def listings(feedback: Sequence[OrderedFeedback]) -> list[Listing]:
    return [
        Listing(frozenset(one.event.msg_ids), one.event.task_id, one.event.run_id, one.place)
        for one in feedback
        if one.event.lists_a_run
    ]


def about_run(run: SessionRun, feedback: Sequence[OrderedFeedback]) -> list[Feedback]:
    """Feedback that lists turns of the run."""
    return [one.event for one in feedback if not run.turn_ids.isdisjoint(one.event.msg_ids)]


def about_session(run: SessionRun, feedback: Sequence[OrderedFeedback], began: int) -> list[Feedback]:
    """Feedback without listed turns: about runs that had begun when it was given, else about the session's first run.

    `began` is the offset of the session's first turn: no run gets feedback about an earlier run.
    """
    return [
        one.event
        for one in feedback
        if not one.event.msg_ids and (run.place < one.turns_until or (one.turns_until <= began and run.place == began))
    ]


def used_up(feedback: Sequence[OrderedFeedback], left: Sequence[SessionRun], closed: Iterable[TurnFacts]) -> list[str]:
    """Return the names of feedback that cannot be about the runs that are `left` open, nor about later turns."""
    open_turns = {turn for run in left for turn in run.turn_ids}
    known = {turn.turn_id for turn in closed}
    return [
        one.name
        for one in feedback
        if (
            open_turns.isdisjoint(one.event.msg_ids) and not known.isdisjoint(one.event.msg_ids)
            if one.event.msg_ids
            else all(run.place >= one.turns_until for run in left)
        )
    ]


def judged(feedback: Sequence[Feedback]) -> bool:
    """Whether the feedback judges: a value in any form, an edit or a preference that stands."""
    return any(one.has_content for one in feedback)
