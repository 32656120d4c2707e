"""Tables of the units (users or sessions) of rollouts: their arms, events and metric values. All times are those of the
rollout's own clock."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Table, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.rollouts.metrics import SessionRecord
from headrace_registry.rollouts.plan import ReadingAge, Unit, UnitReading
from headrace_registry.rollouts.state_machine import UNDER_WAY
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import EVENTS, PROMPTS, READINGS, ROLLOUTS, SESSIONS, UNITS
from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.storage.tables import AT_ONCE_MAX, delete_batch, upsert
from headrace_schemas import EVENTS as KINDS
from headrace_schemas import Event, Feedback, Reward, Trajectory, Turn
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values.errors import InvalidEvent

_UNIT_BYTES_MAX = 64 << 20
"""Maximum bytes of the events of one unit, because a client may send feedback of a megabyte any number of times."""
_READ_BYTES_MAX = 64 << 20
"""Number of bytes of events after which no further unit is loaded at the same time."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Unit of a rollout to which a session belongs, with the present time of the rollout's clock."""

    rollout_id: str
    unit: str
    now_ms: int


@dataclass(frozen=True, slots=True)
class DueUnit:
    """Unit whose metrics must be computed at an age, with its events up to that age."""

    unit: Unit
    sessions: tuple[tuple[str, bytes], ...]
    """Topic and value of each event, in the order in which they were read from the bus."""


async def advance_clocks(tx: AsyncConnection, milliseconds: int) -> None:
    """Advance the clocks of all rollouts in progress by `milliseconds`."""
    later = {"observed_ms": ROLLOUTS.c.observed_ms + milliseconds}
    await tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.phase.in_(UNDER_WAY)).values(later))


async def count_turns(tx: AsyncConnection, drawn: Mapping[str, int], answered: Mapping[tuple[str, str], int]) -> None:
    """Add numbers of turns to the counters of the rollouts in progress.

    Args:
        drawn: number of turns that the split has assigned, by model.
        answered: number of turns by model and the version that answered.
    """
    is_active = ROLLOUTS.c.phase.in_(UNDER_WAY)
    for model, count in drawn.items():
        rows = update(ROLLOUTS).where(ROLLOUTS.c.model == model, is_active)
        await tx.execute(rows.values(turns=ROLLOUTS.c.turns + count))
    for (model, version), count in answered.items():
        rows = update(ROLLOUTS).where(ROLLOUTS.c.model == model, ROLLOUTS.c.version == version, is_active)
        await tx.execute(rows.values(turns_exposed=ROLLOUTS.c.turns_exposed + count))


async def enroll(
    tx: AsyncConnection, member: Membership, session_key: str, tenant: str, *, candidate: bool, window_ms: int
) -> bool:
    """Add a session to its unit. A new unit is added to the arm of the candidate or the control. Return whether the
    session belongs to the unit.

    A session of a user belongs to the unit only if it begins within `window_ms` after the user's first session.
    """
    key = {"rollout_id": member.rollout_id, "unit": member.unit}
    new_unit = {"candidate": candidate, "enrolled_ms": member.now_ms, "looks": 0, "events": 0, "event_bytes": 0}
    session = {"rollout_id": member.rollout_id, "session_key": session_key}
    if not await upsert(tx, UNITS, key, new_unit, update=False) and member.unit != session_key:
        enrolled_unit = select(SESSIONS.c.unit).where(*_equal(SESSIONS, session))
        if (await tx.execute(enrolled_unit)).scalar_one_or_none() is not None:
            return True
        began = select(UNITS.c.enrolled_ms).where(*_equal(UNITS, key))
        if member.now_ms > (await tx.execute(began)).scalar_one() + window_ms:
            return False
    await upsert(tx, SESSIONS, session, {"unit": member.unit, "tenant": tenant}, update=False)
    return True


async def memberships(tx: AsyncConnection, session_key: str, tenant: str) -> list[Membership]:
    """Return the membership of a tenant's session in each rollout in progress; empty if `enroll` has added it to none.

    A membership names the session's unit in the rollout: the session itself or its user.
    """
    query = (
        select(SESSIONS.c.rollout_id, SESSIONS.c.unit, ROLLOUTS.c.observed_ms)
        .join(ROLLOUTS, ROLLOUTS.c.rollout_id == SESSIONS.c.rollout_id)
        .where(SESSIONS.c.session_key == session_key, ROLLOUTS.c.phase.in_(UNDER_WAY))
        .where(or_(SESSIONS.c.tenant == tenant, SESSIONS.c.tenant.is_(None)))
    )
    return [Membership(row.rollout_id, row.unit, row.observed_ms) for row in await tx.execute(query)]


async def add_event(tx: AsyncConnection, member: Membership, event: Event, events_max: int) -> bool:
    """Store an event of a unit. Return False if the unit is closed, or if the event would exceed `events_max` or the
    maximum bytes."""
    value = event.to_json()
    key = {"rollout_id": member.rollout_id, "unit": member.unit}
    has_room = (UNITS.c.events < events_max, UNITS.c.event_bytes + len(value) <= _UNIT_BYTES_MAX)
    conditions = (*_equal(UNITS, key), UNITS.c.events >= 0, *has_room)
    counts = {"events": UNITS.c.events + 1, "event_bytes": UNITS.c.event_bytes + len(value)}
    if not (await tx.execute(update(UNITS).where(*conditions).values(counts))).rowcount:
        return False
    row = {**key, "topic": event.topic, "value": value, "at_ms": member.now_ms}
    await tx.execute(insert(EVENTS).values(row))
    return True


async def due_units(
    tx: AsyncConnection, rollout: RolloutRecord, readings_done: int, age_ms: int, limit: int
) -> tuple[list[DueUnit], bool]:
    """Return the units of a rollout whose metric values (readings) are due at an age, that is, at a time since their
    enrollment.

    Args:
        readings_done: number of readings that are already stored for each of these units, at lower ages.
        age_ms: the age in milliseconds of the rollout's clock. The units have reached it.
        limit: maximum number of units that are returned. If the units are large, fewer are returned.

    Returns:
        The units in order of enrollment, in which tests must evaluate them, and whether there may be more of them.
    """
    query = (
        select(UNITS)
        .where(
            UNITS.c.rollout_id == rollout.rollout_id,
            UNITS.c.looks == readings_done,
            UNITS.c.enrolled_ms <= rollout.observed_ms - age_ms,
        )
        .order_by(UNITS.c.enrolled_ms, UNITS.c.unit)
        .limit(limit)
    )
    units: list[DueUnit] = []
    size_bytes = 0
    for row in (await tx.execute(query)).mappings().all():
        if size_bytes >= _READ_BYTES_MAX:
            return units, True
        events_query = (
            select(EVENTS.c.topic, EVENTS.c.value)
            .where(
                EVENTS.c.rollout_id == rollout.rollout_id,
                EVENTS.c.unit == row["unit"],
                EVENTS.c.at_ms <= row["enrolled_ms"] + age_ms,
            )
            .order_by(EVENTS.c.id)
        )
        events = tuple((event_row.topic, event_row.value) for event_row in await tx.execute(events_query))
        unit = Unit(row["unit"], row["candidate"], from_epoch_ms(row["enrolled_ms"]))
        units.append(DueUnit(unit, events))
        size_bytes += sum(len(value) for _, value in events)
    return units, len(units) == limit


async def add_readings(
    tx: AsyncConnection, rollout_id: str, age: ReadingAge, readings: Sequence[UnitReading], *, is_last: bool
) -> None:
    """Store metric values of units. After the last age, also delete the events of the units."""
    for reading in readings:
        unit = {"rollout_id": rollout_id, "unit": reading.unit.name}
        row = {
            **unit,
            "look": age,
            "candidate": reading.unit.candidate,
            "enrolled_ms": epoch_ms(reading.unit.enrolled),
            "found": json.dumps(dict(reading.values)),
            "expected": json.dumps(dict(reading.expected)),
        }
        await tx.execute(insert(READINGS).values(row))
        changes = {"looks": UNITS.c.looks + 1, **({"events": -1} if is_last else {})}
        await tx.execute(update(UNITS).where(*_equal(UNITS, unit)).values(changes))
        if is_last:
            await tx.execute(delete(EVENTS).where(*_equal(EVENTS, unit)))


async def readings(
    tx: AsyncConnection, rollout_id: str, after: int, limit: int
) -> list[tuple[int, ReadingAge, UnitReading]]:
    """Return up to `limit` stored metric values of units with numbers above `after`, each with its number and age, in
    order."""
    query = select(READINGS).where(READINGS.c.rollout_id == rollout_id, READINGS.c.id > after)
    rows = (await tx.execute(query.order_by(READINGS.c.id).limit(limit))).mappings()
    return [
        (
            row["id"],
            row["look"],
            UnitReading(
                Unit(row["unit"], row["candidate"], from_epoch_ms(row["enrolled_ms"])),
                json.loads(row["found"]),
                json.loads(row["expected"]),
            ),
        )
        for row in rows
    ]


async def clear_ended(tx: AsyncConnection, model: str, kept_max: int) -> bool:
    """Delete a batch of rows that ended rollouts do not need any more. Return whether there may be more.

    Args:
        kept_max: number of newest ended rollouts whose readings and prompts are kept.
    """
    ended = select(ROLLOUTS.c.rollout_id).where(ROLLOUTS.c.model == model, ROLLOUTS.c.phase.not_in(UNDER_WAY))
    if await delete_batch(tx, EVENTS, EVENTS.c.rollout_id.in_(ended), order=EVENTS.c.id):
        return True
    for table, key_column in ((SESSIONS, SESSIONS.c.session_key), (UNITS, UNITS.c.unit)):
        batch = select(table.c.rollout_id, key_column).where(table.c.rollout_id.in_(ended)).limit(AT_ONCE_MAX)
        keys = (await tx.execute(batch)).all()
        for rollout_id, name in keys:
            await tx.execute(delete(table).where(table.c.rollout_id == rollout_id, key_column == name))
        if len(keys) == AT_ONCE_MAX:
            return True
    forgotten = ended.order_by(ROLLOUTS.c.number_id.desc()).limit(100_000).offset(kept_max)
    if await delete_batch(tx, PROMPTS, PROMPTS.c.rollout_id.in_(forgotten), order=PROMPTS.c.id):
        return True
    return await delete_batch(tx, READINGS, READINGS.c.rollout_id.in_(forgotten), order=READINGS.c.id)


def session_records(events: Sequence[tuple[str, bytes]]) -> list[SessionRecord]:
    """Convert the events of a unit to one record for each of its sessions."""
    by_session: dict[str, list[Event]] = {}
    history = TurnHistory()
    for topic, value in events:
        event = KINDS[topic].from_stored(value)
        if isinstance(event, Turn):
            with contextlib.suppress(InvalidEvent):  # it extends a turn that was not stored; readers check `extends`
                event = history.whole_turn(event)
        by_session.setdefault(event.key, []).append(event)
    return [
        SessionRecord(
            key,
            tuple(item for item in session_events if isinstance(item, Turn)),
            tuple(item for item in session_events if isinstance(item, Trajectory)),
            tuple(item for item in session_events if isinstance(item, Reward)),
            tuple(item for item in session_events if isinstance(item, Feedback)),
        )
        for key, session_events in by_session.items()
    ]


def _equal(table: Table, key: dict[str, str]) -> list[ColumnElement[bool]]:
    return [table.c[name] == value for name, value in key.items()]
