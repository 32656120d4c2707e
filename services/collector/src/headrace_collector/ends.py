"""Requests to end sessions, which wait for the turns that were sent before them (docs/decisions/0002).

An end call, feedback that ends its session, a commit and idleness each add a row to the table `ends`, with the end
offsets of `turns` and `feedback` at that time. The end takes effect once the collector has processed these offsets. So
it cannot overtake a turn, and it may arrive before any turn of its session.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import RowMapping, Select, and_, delete, func, insert, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import feedback_targets
from headrace_collector.closing import Choose, RunWithFeedback, close_runs, refuse_session
from headrace_collector.schema import IS_OPEN, ends, feedback, sessions, stream, turns
from headrace_collector.settings import CollectorSettings
from headrace_runtime.clock import epoch_ms
from headrace_runtime.storage.isolation import each
from headrace_runtime.stream.processor import Unfinished
from headrace_schemas import Event
from headrace_schemas.events.trajectory import EndReason

END_WAIT_S = 900.0
"""Seconds that an end waits at most for the turns that were sent before it."""
_AT_ONCE_MAX = 200
"""Largest number of ends that one transaction applies. The timer applies the rest."""


@dataclass(frozen=True, slots=True)
class End:
    """Row of the table `ends`: a request to end one session or, without a session key, all sessions of a tenant."""

    tenant: str
    session_key: str | None
    partition: int
    reason: EndReason
    turns_until: int = 0
    feedback_until: int = 0
    msg_ids: tuple[str, ...] = ()
    before_ms: int | None = None
    unseen_since_ms: int | None = None


async def store_ends(tx: AsyncConnection, now: datetime, *new_ends: End) -> None:
    """Store requests to end sessions. They take effect once the collector has processed the records before them."""
    rows = [
        {
            "tenant": end.tenant,
            "session_key": end.session_key,
            "partition": end.partition,
            "turns_until": end.turns_until,
            "feedback_until": end.feedback_until,
            "reason": end.reason,
            "msg_ids": json.dumps(end.msg_ids) if end.msg_ids else None,
            "before_ms": end.before_ms,
            "unseen_since_ms": end.unseen_since_ms,
            "at_ms": epoch_ms(now),
        }
        for end in new_ends
    ]
    if rows:
        await tx.execute(insert(ends), rows)


async def apply_ends(
    tx: AsyncConnection, now: datetime, settings: CollectorSettings, started: datetime
) -> Sequence[Event]:
    """Apply the ends that are due, the oldest first, and return the trajectories of the runs that they close.

    Args:
        started: time at which this process started. Only time after it counts towards the maximum wait of an end.
    """
    due_ends = await _load_due_ends(tx, now, started)
    if not due_ends:
        return []

    async def apply(row: RowMapping) -> list[Event]:
        if row["session_key"] is None:
            await _replace_by_session_ends(tx, row)
            return []
        key, tenant, reason = row["session_key"], row["tenant"], row["reason"]
        if row["msg_ids"] and not await _has_open_turn(tx, key, json.loads(row["msg_ids"])):
            return []
        return await close_runs(tx, now, settings, key, tenant, reason, _run_filter(row))

    async def refuse(row: RowMapping, error: str) -> list[Event]:
        if row["session_key"] is None:
            return []
        return await refuse_session(tx, now, row["session_key"], row["tenant"], error)

    events = await each(tx, "collector.ends", due_ends, apply, refuse)
    await tx.execute(delete(ends).where(ends.c.id.in_([row["id"] for row in due_ends])))
    if any(row["session_key"] is None for row in due_ends):
        events += await apply_ends(tx, now, settings, started)
    return Unfinished(events) if len(due_ends) == _AT_ONCE_MAX else events


async def _load_due_ends(tx: AsyncConnection, now: datetime, started: datetime) -> Sequence[RowMapping]:
    of_turns, of_feedback = stream.positions.alias(), stream.positions.alias()
    reached = and_(
        ends.c.turns_until <= func.coalesce(of_turns.c.next_offset, 0),
        ends.c.feedback_until <= func.coalesce(of_feedback.c.next_offset, 0),
    )
    overdue = now - timedelta(seconds=END_WAIT_S)
    if overdue >= started:  # a log may end with a control record, and then the position never reaches its end
        reached = or_(reached, ends.c.at_ms <= epoch_ms(overdue))
    query = (
        select(ends)
        .join(of_turns, (of_turns.c.topic == "turns") & (of_turns.c.partition == ends.c.partition), isouter=True)
        .join(
            of_feedback,
            (of_feedback.c.topic == "feedback") & (of_feedback.c.partition == ends.c.partition),
            isouter=True,
        )
        .where(reached)
        .order_by(ends.c.id)
        .limit(_AT_ONCE_MAX)
        .with_for_update(of=ends, skip_locked=True)
    )
    return (await tx.execute(query)).mappings().all()


async def _replace_by_session_ends(tx: AsyncConnection, row: RowMapping) -> None:
    """Replace the request to end all sessions of a tenant by one request for each open session of its partition.

    Only sessions with feedback that no closed run has used are ended. A session that already has such a request gets no
    second one, so that repeated commits do not delay all other ends.
    """
    names = ["tenant", "session_key", "partition", "turns_until", "feedback_until", "reason", "before_ms", "at_ms"]
    constants = {name: literal(row[name], ends.c[name].type) for name in names if name != "session_key"}
    waiting = select(feedback.c.event_id).where(
        feedback.c.session_key == sessions.c.session_key, feedback.c.used_ms.is_(None)
    )
    session_ends = select(*[constants.get(name, sessions.c.session_key) for name in names]).where(
        sessions.c.tenant == row["tenant"],
        sessions.c.partition == row["partition"],
        IS_OPEN,
        waiting.limit(1).scalar_subquery().is_not(None),  # with EXISTS, PostgreSQL may read all sessions to join them
        sessions.c.session_key.not_in(_ending_sessions(row)),
    )
    await tx.execute(insert(ends).from_select(names, session_ends))


def _ending_sessions(row: RowMapping) -> Select[tuple[str]]:
    """Return a query for sessions that already have an end which closes at least the runs that `row` closes.

    Args:
        row: the end of all sessions of a tenant.
    """
    before_ms = row["before_ms"]
    covers = ends.c.before_ms.is_(None)
    if before_ms is not None:
        covers |= ends.c.before_ms >= before_ms
    of_tenant = (ends.c.tenant == row["tenant"]) & ends.c.session_key.is_not(None) & (ends.c.reason == row["reason"])
    return select(ends.c.session_key).where(of_tenant, covers)


async def _has_open_turn(tx: AsyncConnection, session_key: str, turn_ids: Sequence[str]) -> bool:
    """Return whether one of the turns is an open turn of the session."""
    of_session = turns.c.session_key == session_key, turns.c.closed_ms.is_(None)
    return (
        await tx.scalar(select(turns.c.turn_id).where(*of_session, turns.c.turn_id.in_(turn_ids)).limit(1)) is not None
    )


def _run_filter(row: RowMapping) -> Choose:
    listed = frozenset(json.loads(row["msg_ids"])) if row["msg_ids"] else None
    before_ms, unseen_since_ms, commit = row["before_ms"], row["unseen_since_ms"], row["reason"] == "commit"

    def ends(candidate: RunWithFeedback) -> bool:
        run = candidate.run
        return (
            (listed is None or not run.turn_ids.isdisjoint(listed))
            and (before_ms is None or run.time_ms <= before_ms)
            and (unseen_since_ms is None or run.seen_ms <= unseen_since_ms)
            and (not commit or feedback_targets.has_judgement([*candidate.general, *candidate.listed]))
        )

    return lambda candidates: [candidate for candidate in candidates if ends(candidate)]
