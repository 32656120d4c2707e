"""Matching of feedback with the runs of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace_collector.facts import TurnFacts
from headrace_collector.runs import RunListing, SessionRun
from headrace_schemas import Feedback


@dataclass(frozen=True, slots=True)
class OrderedFeedback:
    """Feedback with its position in the log, by which it is ordered."""

    event: Feedback
    log_offset: int
    turns_until: int
    """End offset of `turns` when the feedback was given: earlier turns existed then."""
    event_id: str = ""
    """Column `event_id` of the feedback's row."""


def listings_in(feedback: Sequence[OrderedFeedback]) -> list[RunListing]:
    """Return a listing for each feedback event that lists the turns of a run."""
    return [
        RunListing(frozenset(item.event.msg_ids), item.event.task_id, item.event.run_id, item.log_offset)
        for item in feedback
        if item.event.lists_a_run
    ]


def feedback_about_run(run: SessionRun, feedback: Sequence[OrderedFeedback]) -> list[Feedback]:
    """Return the feedback that lists turns of the run."""
    return [item.event for item in feedback if not run.turn_ids.isdisjoint(item.event.msg_ids)]


def feedback_about_session(run: SessionRun, feedback: Sequence[OrderedFeedback], began: int) -> list[Feedback]:
    """Return the feedback without listed turns that applies to a run.

    It applies to all runs that had begun when it was sent or, if none had, to the session's first run.

    Args:
        began: offset of the session's first turn. Feedback from before it is about an earlier run.
    """
    return [
        item.event
        for item in feedback
        if not item.event.msg_ids
        and (run.log_offset < item.turns_until or (item.turns_until <= began and run.log_offset == began))
    ]


def settled_feedback_ids(
    feedback: Sequence[OrderedFeedback], open_runs: Sequence[SessionRun], closed: Iterable[TurnFacts]
) -> list[str]:
    """Return the ids of feedback that can apply to no open and no later run.

    Args:
        open_runs: the runs of the session that stay open.
        closed: the turns of the session so far.
    """
    open_turns = {turn for run in open_runs for turn in run.turn_ids}
    closed_turns = {turn.turn_id for turn in closed}
    return [
        item.event_id
        for item in feedback
        if (
            open_turns.isdisjoint(item.event.msg_ids) and not closed_turns.isdisjoint(item.event.msg_ids)
            if item.event.msg_ids
            else all(run.log_offset >= item.turns_until for run in open_runs)
        )
    ]


def has_judgement(feedback: Sequence[Feedback]) -> bool:
    """Return whether some feedback contains a value, an edit or a preference, and is not withdrawn."""
    return any(item.has_content for item in feedback)
