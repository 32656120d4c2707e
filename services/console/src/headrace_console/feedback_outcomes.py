"""Outcome of each feedback of a session, such as counted, superseded, withdrawn or dead-lettered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace_schemas import Feedback

Target = tuple[Any, ...]


def feedback_outcomes(
    feedback: Sequence[Feedback],
    *,
    counted: Collection[str],
    untrained: Mapping[str, str],
    refused: Mapping[str, str],
) -> list[str]:
    """Return the outcome of each feedback.

    Args:
        feedback: the feedback of one session, in the order of the log.
        counted: sources with a reward of the session.
        untrained: response id of each turn that no algorithm trains, with the reason.
        refused: event id of each dead-lettered feedback, with the reason.
    """
    last = {_target_of(event): number for number, event in enumerate(feedback) if event.event_id not in refused}
    outcomes = []
    for number, event in enumerate(feedback):
        valid = last.get(_target_of(event), number)
        if event.event_id in refused:
            outcomes.append(f"dead-lettered: {refused[event.event_id]}")
        elif valid != number:
            outcomes.append("withdrawn" if feedback[valid].withdrawn else "superseded")
        elif event.withdrawn:
            outcomes.append("in effect")
        elif not event.has_content:
            outcomes.append("attached to the session")
        else:
            outcomes.append(_effect_of(event, counted, untrained))
    return outcomes


def _target_of(event: Feedback) -> Target:
    """Return the key of which the last feedback is valid."""
    pair = event.preference.pair if event.preference is not None else ()
    return event.source, event.metric, event.rater, event.about, event.level, event.choice, event.msg_ids, pair


def _effect_of(event: Feedback, counted: Collection[str], untrained: Mapping[str, str]) -> str:
    reasons = {untrained.get(turn_id) for turn_id in event.msg_ids}
    if reasons and None not in reasons:
        return "trains nothing: " + ", ".join(sorted(str(reason).replace("_", " ") for reason in reasons))
    if event.about != "value":
        return "passed to the trainer, whose algorithm decides"
    sources = {event.metric_source, *(f"{event.source}:{metric}" for metric in event.parts)}
    return "counted in the reward" if sources & set(counted) else "not matched yet"
