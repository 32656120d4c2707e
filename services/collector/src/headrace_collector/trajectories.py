"""Builds the trajectory of a run from its turns and feedback. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from headrace_collector.branches import build_branches
from headrace_collector.feedback_targets import has_judgement
from headrace_collector.prompts import Prompts
from headrace_schemas import Feedback, LeftOut, Tool, Trajectory, Turn
from headrace_schemas.events.trajectory import SIDE_CALL, EndReason, LeftOutReason
from headrace_schemas.rules.training import left_out_reason
from headrace_schemas.values.bounds import merge_contexts
from headrace_schemas.values.ids import derived_id

_TOOLS_MAX = 1024


def build_trajectory(
    turns: Sequence[Turn],
    *,
    superseded: Collection[str],
    about_run: Sequence[Feedback],
    about_session: Sequence[Feedback],
    reason: EndReason,
    models: int,
    is_side_call: bool = False,
    turns_from: int,
    now: datetime,
    prompts: Prompts | None = None,
) -> Trajectory:
    """Return the trajectory of a run's turns, all of one model, in the order in which they were captured.

    Args:
        superseded: Ids of turns that a retry replaced.
        about_run: Feedback that lists turns of the run. The last one wins, also over `about_session`.
        about_session: Feedback without listed turns. The last one wins.
        models: Number of models that the run called.
        is_side_call: Whether its calls are no part of the client's task. Then only feedback about the run trains it.
        turns_from: Offset of its first turn on `turns`.
        prompts: The prompts of the turns; by default they are built from the turns.

    Raises:
        ValidationError: The run does not fit an event. The bounds in the settings prevent this.
    """
    ordered, first = turns, turns[0]
    prompts = prompts or Prompts(turns)
    reasons = {turn.turn_id: cause for turn in ordered if (cause := _left_out_reason(turn, superseded))}
    graph, dialogues = build_branches([turn for turn in ordered if turn.turn_id not in reasons], prompts)
    feedback = [*about_session, *about_run]
    side_call = SIDE_CALL if is_side_call and not has_judgement(about_run) else None
    return Trajectory(
        time=now,
        trajectory_id=derived_id("trajectory", first.session_key, first.turn_id),
        session_key=first.session_key,
        session_id=first.session_id,
        tenant=first.tenant,
        purpose="eval" if any(turn.purpose == "eval" for turn in ordered) else "train",
        task_id=_last_value([about_session, ordered, about_run], "task_id"),
        run_id=_last_value([about_session, ordered, about_run], "run_id"),
        model=first.model,
        branches=tuple(graph),
        dialogues=tuple(dialogues),
        tools=_tools([prompts.tools(turn.turn_id) for turn in ordered]),
        left_out=tuple(
            LeftOut(turn_id=turn.turn_id, reason=reasons[turn.turn_id], version=turn.version)
            for turn in ordered
            if turn.turn_id in reasons
        ),
        untrained=next((turn.untrained for turn in ordered if turn.untrained), side_call),
        sub_agent=next((turn.sub_agent for turn in ordered if turn.sub_agent), None),
        shadow_of=next((turn.shadow_of for turn in ordered if turn.shadow_of), None),
        parts=max([1, *(item.run_sessions for item in about_run)]) * models,
        end_reason=reason,
        started_at=first.started_at,
        turns_from=turns_from,
        context=merge_contexts(item.context for item in feedback),
    )


def _left_out_reason(turn: Turn, superseded: Collection[str]) -> LeftOutReason | None:
    return "retried" if turn.turn_id in superseded else left_out_reason(turn)


def _last_value(sources: Sequence[Sequence[Turn] | Sequence[Feedback]], field: str) -> str | None:
    values = [getattr(item, field) for items in sources for item in items]
    return next((value for value in reversed(values) if value), None)


def _tools(offers: Sequence[Sequence[Tool]]) -> tuple[Tool, ...]:
    """Return every tool that the run was offered, with the last of several definitions."""
    by_name: dict[str, Tool] = {}
    for offer, earlier in zip(offers, [None, *offers], strict=False):
        if offer is not earlier:  # turns that extend each other share the same object
            by_name |= {tool.function.name: tool for tool in offer}
    return tuple(by_name.values())[:_TOOLS_MAX]
