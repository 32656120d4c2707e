"""Closing of runs: the open turns and the feedback of a run become a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from pydantic import ValidationError
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import feedback_targets, metrics, store
from headrace_collector.branches import build_branches
from headrace_collector.facts import TurnFacts
from headrace_collector.feedback_targets import OrderedFeedback, has_judgement
from headrace_collector.prompts import Prompts, detach_open_turns
from headrace_collector.retries import superseded_turns
from headrace_collector.runs import SessionRun, partition_runs
from headrace_collector.settings import CollectorSettings
from headrace_runtime.clock import epoch_ms
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process.event_loop import run_off_loop
from headrace_runtime.storage.isolation import each
from headrace_schemas import Event, Feedback, LeftOut, Tool, Trajectory, Turn
from headrace_schemas.events.trajectory import SIDE_CALL, EndReason, LeftOutReason
from headrace_schemas.rules.training import left_out_reason
from headrace_schemas.rules.turn_history import UNRESOLVED
from headrace_schemas.values.bounds import merge_contexts
from headrace_schemas.values.ids import derived_id

_TOOLS_MAX = 1024
_DEAD_LETTER_BYTES_MAX = 1_500_000


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
    """Build the trajectory of a run's turns, all of one model, in the order in which they were captured.

    Args:
        superseded: ids of turns that a retry replaced.
        about_run: feedback that lists turns of the run. For each field the last event decides, before those in
            `about_session`.
        about_session: feedback without listed turns, of which the last event decides.
        models: number of models that the run called.
        is_side_call: whether its calls are no part of the client's task. Then only feedback about the run itself trains
            it.
        turns_from: offset of its first turn on `turns`.
        prompts: the prompts of the turns; by default they are built from the turns.

    Raises:
        ValidationError: the run exceeds a bound of events, which the bounds in the settings normally prevent.
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
    """Return all tools that were offered in the run. If a tool has several definitions, return the last one."""
    by_name: dict[str, Tool] = {}
    for offer, earlier in zip(offers, [None, *offers], strict=False):
        if offer is not earlier:  # turns that extend each other share the same object
            by_name |= {tool.function.name: tool for tool in offer}
    return tuple(by_name.values())[:_TOOLS_MAX]


@dataclass(frozen=True, slots=True)
class RunWithFeedback:
    """An open run of a session, with the feedback that lists its turns and the feedback about the session."""

    run: SessionRun
    listed: Sequence[Feedback]
    """Feedback that lists turns of the run."""
    general: Sequence[Feedback]
    """Feedback about the session, without listed turns."""


Choose = Callable[[Sequence[RunWithFeedback]], Sequence[RunWithFeedback]]
"""Selects which of a session's open runs to close."""


async def close_runs(
    tx: AsyncConnection,
    now: datetime,
    settings: CollectorSettings,
    session_key: str,
    tenant: str,
    reason: EndReason,
    choose: Choose,
) -> list[Event]:
    """Close the open runs that `choose` selects, and return their trajectories. A session belongs to one tenant."""
    session = await store.lock_session(tx, session_key)
    if session is None or not session["open_turns"] or session["tenant"] != tenant:
        return []
    turns, feedback = await load_session(tx, now, settings, session)
    runs = await find_open_runs(tx, settings, turns, feedback)
    candidates = [
        RunWithFeedback(
            run,
            feedback_targets.feedback_about_run(run, feedback),
            feedback_targets.feedback_about_session(run, feedback, session["began"]),
        )
        for run in runs
    ]
    chosen = choose(candidates)
    if not chosen:
        return []
    superseded = superseded_turns(turns)

    async def close(candidate: RunWithFeedback) -> list[Event]:
        return await _close(tx, now, candidate, superseded, reason)

    async def refuse(candidate: RunWithFeedback, error: str) -> list[Event]:
        return await _dead_letter_turns(tx, now, candidate.run.turn_ids, f"its run cannot be closed: {error}")

    events = await each(tx, "collector.close", chosen, close, refuse)
    still_open = [candidate.run for candidate in candidates if candidate not in chosen]
    if still_open:
        await detach_open_turns(tx, session_key)
    await store.update_open_size(tx, session_key, still_open, round(settings.idle_s * 1000))
    await store.mark_used(tx, feedback_targets.settled_feedback_ids(feedback, still_open, turns), now)
    return events


async def load_session(
    tx: AsyncConnection, now: datetime, settings: CollectorSettings, session: RowMapping
) -> tuple[list[TurnFacts], list[OrderedFeedback]]:
    """Return the turns and the feedback of a session from which its runs are determined."""
    since_ms = epoch_ms(now - timedelta(seconds=settings.retention_s))
    turns = await store.facts_of_session(tx, session["session_key"], since_ms)
    return turns, await store.feedback_of_session(tx, session["session_key"], session["tenant"], since_ms)


async def find_open_runs(
    tx: AsyncConnection,
    settings: CollectorSettings,
    turns: Sequence[TurnFacts],
    feedback: Sequence[OrderedFeedback],
) -> Sequence[SessionRun]:
    """Divide the open turns of a session into runs (attempts at a task), usually one for each conversation.

    Message contents are read from the database only if digests do not suffice to separate the conversations.
    """
    listings = feedback_targets.listings_in(feedback)
    apart = settings.side_calls == "apart"
    partition = partition_runs(turns, listings, separates_side_calls=apart)
    if partition.ties:
        contents = await store.load_contents(tx, partition.ties)
        partition = partition_runs(turns, listings, contents, separates_side_calls=apart)
    return partition.runs


async def _close(
    tx: AsyncConnection, now: datetime, candidate: RunWithFeedback, superseded: Collection[str], reason: EndReason
) -> list[Event]:
    stored_turns, prompts = await store.load_turns(tx, candidate.run.turn_ids)
    letters = await _refuse_unresolved(tx, now, prompts, candidate.run.turn_ids)
    turns = [turn for turn in stored_turns if turn.turn_id in prompts]
    if not turns:
        return letters
    build = partial(
        build_trajectory,
        turns,
        superseded=superseded,
        about_run=candidate.listed,
        about_session=candidate.general,
        reason=reason,
        models=candidate.run.models,
        is_side_call=candidate.run.is_side_call,
        turns_from=candidate.run.log_offset,
        now=now,
        prompts=prompts,
    )
    try:
        trajectory = await run_off_loop(prompts.size_bytes, build)
    except ValidationError as error:  # one run that fits no event must not delay all others
        problem, *_ = error.errors()
        text = f"its run does not fit a trajectory: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        return [*letters, *await _dead_letter_turns(tx, now, [turn.turn_id for turn in turns], text)]
    await store.close_turns(tx, [turn.turn_id for turn in turns], trajectory.trajectory_id, now)
    _count_metrics(trajectory)
    return [*letters, trajectory]


async def _refuse_unresolved(
    tx: AsyncConnection, now: datetime, prompts: Prompts, turn_ids: Collection[str]
) -> list[Event]:
    """Close the turns of a run whose prompt cannot be restored, and return their dead letters.

    The prompt of a turn that extends another turn needs this other turn, which is missing here.
    """
    letters: list[Event] = []
    for turn_id in sorted(prompts.unresolved.keys() & set(turn_ids)):
        letters += await _dead_letter_turns(tx, now, [turn_id], prompts.unresolved[turn_id], UNRESOLVED)
    return letters


async def refuse_session(tx: AsyncConnection, now: datetime, session_key: str, tenant: str, error: str) -> list[Event]:
    """Close all open turns of a session that cannot be read, and return a dead letter for each of them.

    Args:
        tx: the transaction.
        now: the present time.
        session_key: key of the session.
        tenant: tenant of the session. If another tenant has the session, nothing is closed.
        error: reason why the session cannot be read, for the dead letters.
    """
    session = await store.lock_session(tx, session_key)
    if session is None or session["tenant"] != tenant:
        return []
    turn_ids = await store.open_turn_ids(tx, session_key)
    letters = await _dead_letter_turns(tx, now, turn_ids, f"its session cannot be read: {error}")
    await store.update_open_size(tx, session_key, [], 0)
    return letters


async def _dead_letter_turns(
    tx: AsyncConnection, now: datetime, turn_ids: Collection[str], error: str, reason: str = "invalid_trajectory"
) -> list[Event]:
    """Close turns that get no trajectory, and return a dead letter for each, with the turn's stored content.

    Args:
        tx: the transaction.
        now: the present time.
        turn_ids: ids of the turns.
        error: message of the dead letters.
        reason: kind of the error, by which dead letters are grouped.
    """
    letters: list[Event] = []
    for turn_id, session_key, payload in await store.load_payloads(tx, turn_ids):
        value, headers = (payload or b"")[:_DEAD_LETTER_BYTES_MAX], (("ce_id", turn_id.encode("utf-8", "replace")),)
        record = Record(Turn.topic, -1, -1, session_key.encode(), value, headers)
        letters.append(dead_letter("collector", record, reason, error))
    await store.close_turns(tx, turn_ids, "refused", now)
    return letters


def _count_metrics(trajectory: Trajectory) -> None:
    metrics.TRAJECTORIES.labels(trajectory.end_reason).inc()
    metrics.BRANCHES.observe(len(trajectory.branches))
    metrics.TURNS.observe(len(trajectory.turn_ids))
    if trajectory.purpose == "eval":
        return
    for item in trajectory.left_out:
        metrics.LEFT_OUT.labels(item.reason).inc()
    for branch in trajectory.branches:
        for span in branch.spans:
            metrics.TOKENS.labels(span.token_kind).inc(len(span.logprobs))
