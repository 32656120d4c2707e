"""Matches feedback with the runs of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace_collector.facts import TurnFacts
from headrace_collector.runs import Listing, SessionRun
from headrace_schemas import Feedback


@dataclass(frozen=True, slots=True)
class OrderedFeedback:
    """A feedback with its position in the log, which orders feedback by the time of its acknowledgement."""

    event: Feedback
    log_offset: int
    turns_until: int
    """End offset of `turns` when the feedback was given: earlier turns existed then."""
    event_id: str = ""
    """The `event_id` of its row."""


def listings_in(feedback: Sequence[OrderedFeedback]) -> list[Listing]:
    """Return the listings of all feedback that lists the turns of a run."""
    return [
        Listing(frozenset(item.event.msg_ids), item.event.task_id, item.event.run_id, item.log_offset)
        for item in feedback
        if item.event.lists_a_run
    ]


def feedback_about_run(run: SessionRun, feedback: Sequence[OrderedFeedback]) -> list[Feedback]:
    """Return the feedback that lists turns of the run."""
    return [item.event for item in feedback if not run.turn_ids.isdisjoint(item.event.msg_ids)]


def feedback_about_session(run: SessionRun, feedback: Sequence[OrderedFeedback], began: int) -> list[Feedback]:
    """Return feedback without listed turns about runs that had begun when it was given, else about the session's first
    run.

    `began` is the offset of the session's first turn: no run gets feedback about an earlier run.
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
    """Return the ids of the feedback that no later run can get.

    Args:
        open_runs: The runs of the session that stay open.
        closed: The turns of the session so far.
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
    """Return whether some feedback has a value in any form, an edit or a preference that is not withdrawn."""
    return any(item.has_content for item in feedback)
