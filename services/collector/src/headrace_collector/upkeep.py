"""Periodic work: end idle runs, limit the open sessions, delete old content, dead-letter feedback without a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import RowMapping, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import metrics
from headrace_collector.closing import find_open_runs, load_session
from headrace_collector.ends import END_WAIT_S, End, store_ends
from headrace_collector.schema import IS_OPEN, IS_OVER, ends, feedback, sessions, stream, turns
from headrace_collector.settings import CollectorSettings
from headrace_runtime.clock import epoch_ms
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.wire import Record
from headrace_runtime.storage.isolation import each
from headrace_runtime.storage.tables import AT_ONCE_MAX, COUNTED_MAX, count_rows, delete_batch
from headrace_runtime.stream.processor import Unfinished
from headrace_schemas import Event, Feedback
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values.ids import key_of_response

_SURPLUS_AT_ONCE_MAX = 500
_TARGETS_AT_ONCE_MAX = 50
_AT_ONCE_MAX = 50


async def close_surplus_sessions(tx: AsyncConnection, now: datetime, settings: CollectorSettings) -> Sequence[Event]:
    """Close sessions if there are more than `open_sessions_max`, and set the gauges.

    Of the tenants with the most open sessions, those idle for longest are closed, so that no tenant can end the
    sessions of another one.
    """
    count = await count_rows(tx, IS_OPEN, sessions, settings.open_sessions_max + _SURPLUS_AT_ONCE_MAX)
    metrics.OPEN_SESSIONS.set(count)
    metrics.WAITING_ENDS.set(await count_rows(tx, None, ends, COUNTED_MAX))
    metrics.WAITING_FEEDBACK.set(await count_rows(tx, feedback.c.resolved.is_(False), feedback, COUNTED_MAX))
    surplus = count - settings.open_sessions_max
    if surplus > 0:
        rows = await _surplus_sessions(tx, surplus)
        await store_ends(tx, now, *(End(row["tenant"], row["session_key"], row["partition"], "limit") for row in rows))
    return []


async def _surplus_sessions(tx: AsyncConnection, surplus: int) -> list[RowMapping]:
    counted = select(sessions.c.tenant, func.count()).where(IS_OPEN).group_by(sessions.c.tenant)
    counts: dict[str, int] = dict((await tx.execute(counted)).tuples().all())
    rows: list[RowMapping] = []
    for tenant, number in divide_surplus(counts, surplus).items():
        open_sessions = select(sessions).where(IS_OPEN, sessions.c.tenant == tenant)
        rows += (await tx.execute(open_sessions.order_by(sessions.c.seen_ms).limit(number))).mappings()
    return rows


def divide_surplus(counts: Mapping[str, int], surplus: int) -> dict[str, int]:
    """Return how many sessions to close for each tenant, `surplus` in total, from the tenants with the most open
    sessions.

    Args:
        counts: number of open sessions of each tenant, together at least `surplus`.
        surplus: number of sessions to close.
    """
    tenants = sorted(counts, key=lambda tenant: -counts[tenant])
    for size in range(1, len(tenants) + 1):
        remaining = sum(counts[name] for name in tenants[:size]) - surplus
        if size == len(tenants) or remaining >= size * counts[tenants[size]]:
            level, extra = divmod(remaining, size)
            remaining_counts = {name: level + (index < extra) for index, name in enumerate(tenants[:size])}
            return {name: counts[name] - number for name, number in remaining_counts.items() if number < counts[name]}
    return {}


async def delete_old_rows(tx: AsyncConnection, now: datetime, settings: CollectorSettings) -> Sequence[Event]:
    """Delete the content of closed turns after `retention_s` and their rows after `remember_s`, one batch per call."""
    dropped = epoch_ms(now - timedelta(seconds=settings.retention_s))
    forgotten = epoch_ms(now - timedelta(seconds=settings.remember_s))
    closing_time, feedback_time, session_time = turns.c.closed_ms, feedback.c.at_ms, sessions.c.seen_ms
    stale = select(turns.c.turn_id).where(closing_time <= dropped, turns.c.payload.is_not(None)).order_by(closing_time)
    cleared = update(turns).where(turns.c.turn_id.in_(stale.limit(AT_ONCE_MAX))).values(payload=None)
    more = [
        (await tx.execute(cleared)).rowcount >= AT_ONCE_MAX,
        await delete_batch(tx, turns, closing_time <= forgotten, order=closing_time),
        await delete_batch(tx, feedback, feedback.c.resolved & (feedback_time <= forgotten), order=feedback_time),
        await delete_batch(tx, sessions, IS_OVER & (session_time <= forgotten), order=session_time),
    ]
    return Unfinished() if any(more) else []


async def check_feedback_targets(tx: AsyncConnection, now: datetime, settings: CollectorSettings) -> Sequence[Event]:
    """Dead-letter feedback that has waited for `feedback_wait_s` and refers to no known turn or session.

    Only the oldest feedback is checked: where a partition of `turns` lags, all later feedback waits with it.
    """
    waited = now - timedelta(seconds=settings.feedback_wait_s)
    overdue = waited - timedelta(seconds=END_WAIT_S)
    reached = select(stream.positions.c.next_offset).where(
        stream.positions.c.topic == "turns", stream.positions.c.partition == feedback.c.partition
    )
    oldest = (
        select(feedback.c.event_id)
        .where(feedback.c.resolved.is_(False), feedback.c.at_ms <= epoch_ms(waited))
        .order_by(feedback.c.at_ms)
        .limit(_TARGETS_AT_ONCE_MAX)
    )
    reached_it = feedback.c.turns_until <= func.coalesce(reached.scalar_subquery(), 0)
    due_feedback = select(feedback).where(
        feedback.c.event_id.in_(oldest), reached_it | (feedback.c.at_ms <= epoch_ms(overdue))
    )
    in_order = due_feedback.order_by(feedback.c.at_ms, feedback.c.source_offset)
    rows: Sequence[RowMapping] = (await tx.execute(in_order)).mappings().all()

    async def examine(row: RowMapping) -> list[Event]:
        event = Feedback.from_stored(row["payload"])
        if await _has_target(tx, event):
            await tx.execute(update(feedback).where(feedback.c.event_id == row["event_id"]).values(resolved=True))
            return []
        named = f"{len(event.msg_ids)} turns" if event.msg_ids else "its session"
        error = f"{named} were not seen within {settings.feedback_wait_s:g} s by tenant {event.tenant}"
        await _delete_feedback(tx, row)
        return [dead_letter("collector", _record(row, event), "unknown_target", error)]

    async def refuse(row: RowMapping, error: str) -> list[Event]:
        await _delete_feedback(tx, row)
        headers = (("ce_id", row["event_id"].encode("utf-8", "replace")),)
        position = "feedback", row["partition"], row["source_offset"]
        record = Record(*position, row["session_key"].encode(), row["payload"], headers)
        return [dead_letter("collector", record, "handler_error", error)]

    letters = await each(tx, "collector.targets", rows, examine, refuse)
    return Unfinished(letters) if rows else letters


async def _delete_feedback(tx: AsyncConnection, row: RowMapping) -> None:
    """Delete feedback and the id by which duplicates are recognised, so that its dead letter can be retried."""
    await tx.execute(delete(feedback).where(feedback.c.event_id == row["event_id"]))
    await tx.execute(delete(stream.seen).where(stream.seen.c.event_id == row["event_id"]))


def _record(row: RowMapping, event: Feedback) -> Record:
    """Return stored feedback as the record that was on the bus, so that a retry keeps its offset."""
    envelope = Envelope.of(event, "collector", after={"turns": row["turns_until"]})
    position = "feedback", row["partition"], row["source_offset"]
    return Record(*position, event.key.encode(), row["payload"], envelope.headers())


async def _has_target(tx: AsyncConnection, event: Feedback) -> bool:
    foreign_keys = {key_of_response(turn) for turn in event.msg_ids} - {None, event.session_key}
    if foreign_keys:  # the first releases sent all listed turns to each session that had one of them
        return True
    sessions_found = select(sessions.c.session_key).where(
        sessions.c.session_key == event.session_key, sessions.c.tenant == event.tenant
    )
    if event.msg_ids:
        listed = select(turns.c.turn_id).where(turns.c.turn_id.in_(event.msg_ids))
        sessions_found = sessions_found.where(listed.where(turns.c.session_key == event.session_key).exists())
    return (await tx.scalar(sessions_found.limit(1))) is not None


async def end_idle_runs(
    tx: AsyncConnection, now: datetime, settings: CollectorSettings, started: datetime, turns_end: Mapping[int, int]
) -> Sequence[Event]:
    """Store a request to end each idle run. These requests close the runs later, so no events are returned.

    Args:
        turns_end: end offset of each partition of `turns`, read before `tx` began.
        started: time at which this process started. No run is idle before `idle_s` after it, because turns that were
            sent while this service was away must arrive first.
    """
    idle = timedelta(seconds=settings.idle_s)
    if now < started + idle:
        return []
    since_ms = epoch_ms(now - idle)
    due_sessions = select(sessions).where(sessions.c.check_ms <= epoch_ms(now)).order_by(sessions.c.check_ms)
    rows = (await tx.execute(due_sessions.limit(_AT_ONCE_MAX).with_for_update(skip_locked=True))).mappings().all()

    async def examine(row: RowMapping) -> list[Event]:
        last_seen = [row["seen_ms"]]
        if row["seen_ms"] > since_ms:  # another run of the session may be idle all the same
            runs = await find_open_runs(tx, settings, *await load_session(tx, now, settings, row))
            last_seen = [run.seen_ms for run in runs]
        if min(last_seen) <= since_ms:
            await store_ends(tx, now, end_of(row))
        busy = [seen_ms for seen_ms in last_seen if seen_ms > since_ms]
        await schedule_check(row, min(busy, default=epoch_ms(now)) + epoch_ms(now) - since_ms)
        return []

    async def end_unread(row: RowMapping, _reason: str) -> list[Event]:
        """Store an end for a session whose content cannot be read; its turns are dead-lettered when the end is
        applied.
        """
        await store_ends(tx, now, end_of(row))
        await schedule_check(row, epoch_ms(now) + epoch_ms(now) - since_ms)
        return []

    def end_of(row: RowMapping) -> End:
        until = turns_end.get(row["partition"], 0)
        return End(row["tenant"], row["session_key"], row["partition"], "idle", until, unseen_since_ms=since_ms)

    async def schedule_check(row: RowMapping, check_ms: int) -> None:
        await tx.execute(update(sessions).where(sessions.c.session_key == row["session_key"]).values(check_ms=check_ms))

    await each(tx, "collector.idle", rows, examine, end_unread)
    return Unfinished() if len(rows) == _AT_ONCE_MAX else []
