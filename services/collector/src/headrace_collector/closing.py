"""Closes runs of a session: what was open becomes trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import applies, metrics, store
from headrace_collector.facts import TurnFacts
from headrace_collector.retries import superseded
from headrace_collector.runs import Partition, Run, partition
from headrace_collector.settings import Settings
from headrace_collector.trajectories import trajectory
from headrace_runtime.dead_letters import dead_letter
from headrace_runtime.wire import Record
from headrace_schemas import Event, Feedback, Trajectory, Turn
from headrace_schemas.events.trajectory import EndReason

_DEAD_LETTER_BYTES_MAX = 1_500_000

Choose = Callable[[Run, Sequence[Feedback]], bool]
"""Whether to close a run, given the feedback about it."""


def every_run(_run: Run, _feedback: Sequence[Feedback]) -> bool:
    return True


async def close_runs(
    tx: AsyncConnection,
    now: datetime,
    settings: Settings,
    session_key: str,
    tenant: str,
    reason: EndReason,
    choose: Choose,
) -> list[Event]:
    """Close the open runs that `choose` picks, and return their trajectories. A session is its tenant's alone."""
    session = await store.lock_session(tx, session_key)
    if session is None or not session["open_turns"] or session["tenant"] != tenant:
        return []
    turns = await store.facts_of_session(tx, session_key)
    feedback = await store.feedback_of_session(tx, session_key, tenant)
    runs = await runs_of(tx, turns, feedback)
    given_up = superseded(turns)
    events: list[Event] = []
    left = []
    for run in runs:
        listed = applies.about_run(run, feedback)
        general = applies.about_session(run, feedback, turns)
        if not choose(run, [*general, *listed]):
            left.append(run)
            continue
        content = await store.load_turns(tx, run.turn_ids)
        try:
            made = trajectory(
                content,
                given_up=given_up,
                about_run=listed,
                about_session=general,
                reason=reason,
                models=run.models,
                now=now,
            )
        except ValidationError as error:  # one run that fits no event must not hold up all others
            events += [_refused(turn, error) for turn in content]
            await store.close(tx, run, "refused", now)
            continue
        events.append(made)
        _count(made)
        await store.close(tx, run, made.trajectory_id, now)
    if len(left) < len(runs):
        await store.recount(tx, session_key, left, round(settings.idle_s * 1000))
    return events


async def runs_of(tx: AsyncConnection, turns: Sequence[TurnFacts], feedback: Sequence[Feedback]) -> Sequence[Run]:
    """The open runs of a session; tokens are read only when conversations alone do not tell."""
    listings = applies.listings(feedback)
    found: Partition = partition(turns, listings)
    if found.ties:
        found = partition(turns, listings, await store.load_tokens(tx, found.ties))
    return found.runs


def _refused(turn: Turn, error: ValidationError) -> Event:
    problem = error.errors(include_input=False, include_url=False, include_context=False)[0]
    text = f"its run makes no trajectory: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    value = turn.to_json()[:_DEAD_LETTER_BYTES_MAX]
    record = Record(turn.topic, -1, -1, turn.key.encode(), value, (("ce_id", turn.event_id.encode()),))
    return dead_letter("collector", record, "invalid_trajectory", text)


def _count(made: Trajectory) -> None:
    metrics.TRAJECTORIES.labels(made.end_reason).inc()
    metrics.BRANCHES.observe(len(made.branches))
    metrics.TURNS.observe(len(made.turn_ids))
    for item in made.left_out:
        metrics.LEFT_OUT.labels(item.reason).inc()
