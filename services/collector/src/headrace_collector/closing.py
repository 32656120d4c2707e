"""Closes runs of a session: their open turns become trajectories."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from pydantic import ValidationError
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import feedback_targets, metrics, references, store
from headrace_collector.facts import TurnFacts
from headrace_collector.feedback_targets import OrderedFeedback
from headrace_collector.prompts import Prompts
from headrace_collector.retries import superseded_turns
from headrace_collector.runs import SessionRun, partition_runs
from headrace_collector.settings import CollectorSettings
from headrace_collector.trajectories import build_trajectory
from headrace_runtime.clock import epoch_ms
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process.worker_threads import run_off_loop
from headrace_runtime.storage.isolation import each
from headrace_schemas import Event, Feedback, Trajectory, Turn
from headrace_schemas.events.trajectory import EndReason
from headrace_schemas.rules.turn_history import UNRESOLVED

_DEAD_LETTER_BYTES_MAX = 1_500_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """An open run and the feedback about it: feedback that lists its turns, and feedback about its session."""

    run: SessionRun
    listed: Sequence[Feedback]
    general: Sequence[Feedback]


Choose = Callable[[Sequence[Candidate]], Sequence[Candidate]]
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
        Candidate(
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

    async def close(candidate: Candidate) -> list[Event]:
        return await _close(tx, now, candidate, superseded, reason)

    async def refuse(candidate: Candidate, error: str) -> list[Event]:
        return await _refuse(tx, now, candidate.run.turn_ids, f"its run cannot be closed: {error}")

    events = await each(tx, "collector.close", chosen, close, refuse)
    still_open = [candidate.run for candidate in candidates if candidate not in chosen]
    if still_open:
        await references.detach_open_turns(tx, session_key)
    await store.update_open_size(tx, session_key, still_open, round(settings.idle_s * 1000))
    await store.mark_used(tx, feedback_targets.used_feedback(feedback, still_open, turns), now)
    return events


async def load_session(
    tx: AsyncConnection, now: datetime, settings: CollectorSettings, session: RowMapping
) -> tuple[list[TurnFacts], list[OrderedFeedback]]:
    """Return the turns and the feedback of a session that determine its runs."""
    since_ms = epoch_ms(now - timedelta(seconds=settings.retention_s))
    turns = await store.facts_of_session(tx, session["session_key"], since_ms)
    return turns, await store.feedback_of_session(tx, session["session_key"], session["tenant"], since_ms)


async def find_open_runs(
    tx: AsyncConnection,
    settings: CollectorSettings,
    turns: Sequence[TurnFacts],
    feedback: Sequence[OrderedFeedback],
) -> Sequence[SessionRun]:
    """Return the open runs of a session. Contents are read only if the conversations are ambiguous."""
    listings = feedback_targets.listings_in(feedback)
    apart = settings.side_calls == "apart"
    partition = partition_runs(turns, listings, separates_side_calls=apart)
    if partition.ties:
        contents = await store.load_contents(tx, partition.ties)
        partition = partition_runs(turns, listings, contents, separates_side_calls=apart)
    return partition.runs


async def _close(
    tx: AsyncConnection, now: datetime, candidate: Candidate, superseded: Collection[str], reason: EndReason
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
        return [*letters, *await _refuse(tx, now, [turn.turn_id for turn in turns], text)]
    await store.close(tx, [turn.turn_id for turn in turns], trajectory.trajectory_id, now)
    _count_metrics(trajectory)
    return [*letters, trajectory]


async def _refuse_unresolved(
    tx: AsyncConnection, now: datetime, prompts: Prompts, turn_ids: Collection[str]
) -> list[Event]:
    """Close the turns of a run with references that cannot be followed, and return their dead letters."""
    letters: list[Event] = []
    for turn_id in sorted(prompts.unresolved.keys() & set(turn_ids)):
        letters += await _refuse(tx, now, [turn_id], prompts.unresolved[turn_id], UNRESOLVED)
    return letters


async def refuse_session(tx: AsyncConnection, now: datetime, session_key: str, tenant: str, error: str) -> list[Event]:
    """Close all open turns of a session that cannot be read, and dead-letter them."""
    session = await store.lock_session(tx, session_key)
    if session is None or session["tenant"] != tenant:
        return []
    turn_ids = await store.open_turns(tx, session_key)
    letters = await _refuse(tx, now, turn_ids, f"its session cannot be read: {error}")
    await store.update_open_size(tx, session_key, [], 0)
    return letters


async def _refuse(
    tx: AsyncConnection, now: datetime, turn_ids: Collection[str], error: str, reason: str = "invalid_trajectory"
) -> list[Event]:
    """Close turns without a trajectory, and return the dead letter of each, with the content as it was stored."""
    letters: list[Event] = []
    for turn_id, session_key, payload in await store.load_payloads(tx, turn_ids):
        value, headers = (payload or b"")[:_DEAD_LETTER_BYTES_MAX], (("ce_id", turn_id.encode("utf-8", "replace")),)
        record = Record(Turn.topic, -1, -1, session_key.encode(), value, headers)
        letters.append(dead_letter("collector", record, reason, error))
    await store.close(tx, turn_ids, "refused", now)
    return letters


def _count_metrics(trajectory: Trajectory) -> None:
    metrics.TRAJECTORIES.labels(trajectory.end_reason).inc()
    metrics.BRANCHES.observe(len(trajectory.branches))
    metrics.TURNS.observe(len(trajectory.turn_ids))
    for item in trajectory.left_out:
        metrics.LEFT_OUT.labels(item.reason).inc()
    for branch in trajectory.branches:
        for span in branch.spans:
            metrics.TOKENS.labels(span.token_kind).inc(len(span.logprobs))
