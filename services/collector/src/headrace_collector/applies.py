"""Which feedback is about which run of a session."""

from __future__ import annotations

from collections.abc import Sequence

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


def about_session(run: Run, feedback: Sequence[Feedback], turns: Sequence[TurnFacts]) -> list[Feedback]:
    """Feedback that lists nothing: it is about what had begun when it was given, or else about what came first.

    `turns` are all that are known of the session, so that a run does not inherit what was said about the one before.
    """
    began_ms = min(turn.started_ms for turn in turns)
    times = ((one, epoch_ms(one.time)) for one in feedback if not one.msg_ids)
    return [one for one, at_ms in times if run.started_ms <= at_ms or (at_ms < began_ms and run.started_ms == began_ms)]


def judged(feedback: Sequence[Feedback]) -> bool:
    """Whether somebody said how good it was."""
    return any(one.value is not None and not one.withdrawn for one in feedback)
