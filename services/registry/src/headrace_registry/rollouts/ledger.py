"""Who is in an arm, what is known of each, and what was read of it: rows, on the rollout's own clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Table, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.rollout_tables import EVENTS, PROMPTS, READINGS, ROLLOUTS, SESSIONS, UNITS
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.rollouts.machine import UNDER_WAY
from headrace_registry.rollouts.maturity import Unit, UnitReading
from headrace_registry.rollouts.plan import Look
from headrace_registry.rollouts.records import SessionRecord
from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.sweeping import AT_ONCE_MAX, remove_some
from headrace_runtime.upsert import upsert
from headrace_schemas import EVENTS as KINDS
from headrace_schemas import Event, Feedback, Reward, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Membership:
    """A rollout that goes on, the unit that an event is about, and the time by the rollout's clock."""

    rollout_id: str
    unit: str
    now_ms: int


@dataclass(frozen=True, slots=True)
class DueUnit:
    """A unit that has come to an age, with everything that was known of it by then."""

    unit: Unit
    sessions: tuple[tuple[str, bytes], ...]
    """Topic and value of each event, in the order in which they were read."""


async def elapse(tx: AsyncConnection, milliseconds: int) -> None:
    """All that was on the topics so long ago has been read."""
    later = {"observed_ms": ROLLOUTS.c.observed_ms + milliseconds}
    await tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.phase.in_(UNDER_WAY)).values(later))


async def count_turns(tx: AsyncConnection, drawn: Mapping[str, int], answered: Mapping[tuple[str, str], int]) -> None:
    """Turns that the split has drawn, by model, and who answered them, by model and version."""
    going_on = ROLLOUTS.c.phase.in_(UNDER_WAY)
    for model, count in drawn.items():
        rows = update(ROLLOUTS).where(ROLLOUTS.c.model == model, going_on)
        await tx.execute(rows.values(turns=ROLLOUTS.c.turns + count))
    for (model, version), count in answered.items():
        rows = update(ROLLOUTS).where(ROLLOUTS.c.model == model, ROLLOUTS.c.version == version, going_on)
        await tx.execute(rows.values(turns_exposed=ROLLOUTS.c.turns_exposed + count))


async def enroll(
    tx: AsyncConnection, member: Membership, session_key: str, tenant: str, *, candidate: bool, window_ms: int
) -> bool:
    """Whether the session counts for the unit. A unit begins once; of a user, sessions of the window belong to it."""
    key = {"rollout_id": member.rollout_id, "unit": member.unit}
    fresh = {"candidate": candidate, "enrolled_ms": member.now_ms, "looks": 0, "events": 0}
    session = {"rollout_id": member.rollout_id, "session_key": session_key}
    if not await upsert(tx, UNITS, key, fresh, update=False) and member.unit != session_key:
        known = select(SESSIONS.c.unit).where(*_equal(SESSIONS, session))
        if (await tx.execute(known)).scalar_one_or_none() is not None:
            return True
        began = select(UNITS.c.enrolled_ms).where(*_equal(UNITS, key))
        if member.now_ms > (await tx.execute(began)).scalar_one() + window_ms:
            return False
    await upsert(tx, SESSIONS, session, {"unit": member.unit, "tenant": tenant}, update=False)
    return True


async def memberships(tx: AsyncConnection, session_key: str, tenant: str) -> list[Membership]:
    """The units that a session of a tenant belongs to, of each rollout that goes on. Other tenants have none of it."""
    query = (
        select(SESSIONS.c.rollout_id, SESSIONS.c.unit, ROLLOUTS.c.observed_ms)
        .join(ROLLOUTS, ROLLOUTS.c.rollout_id == SESSIONS.c.rollout_id)
        .where(SESSIONS.c.session_key == session_key, ROLLOUTS.c.phase.in_(UNDER_WAY))
        .where(or_(SESSIONS.c.tenant == tenant, SESSIONS.c.tenant.is_(None)))
    )
    return [Membership(row.rollout_id, row.unit, row.observed_ms) for row in await tx.execute(query)]


async def keep(tx: AsyncConnection, member: Membership, event: Event, most: int) -> bool:
    """Until the unit is closed; False when it has `most` already, or was closed."""
    key = {"rollout_id": member.rollout_id, "unit": member.unit}
    room = (*_equal(UNITS, key), UNITS.c.events < most, UNITS.c.events >= 0)
    counted = await tx.execute(update(UNITS).where(*room).values(events=UNITS.c.events + 1))
    if not counted.rowcount:
        return False
    row = {**key, "topic": event.topic, "value": event.to_json(), "at_ms": member.now_ms}
    await tx.execute(insert(EVENTS).values(row))
    return True


async def due(tx: AsyncConnection, rollout: KeptRollout, taken: int, age_ms: int, limit: int) -> list[DueUnit]:
    """Units of that age whose next reading is number `taken`, in the order of readings."""
    query = (
        select(UNITS)
        .where(
            UNITS.c.rollout_id == rollout.rollout_id,
            UNITS.c.looks == taken,
            UNITS.c.enrolled_ms <= rollout.observed_ms - age_ms,
        )
        .order_by(UNITS.c.enrolled_ms, UNITS.c.unit)
        .limit(limit)
    )
    found = []
    for row in (await tx.execute(query)).mappings().all():
        known = (
            select(EVENTS.c.topic, EVENTS.c.value)
            .where(
                EVENTS.c.rollout_id == rollout.rollout_id,
                EVENTS.c.unit == row["unit"],
                EVENTS.c.at_ms <= row["enrolled_ms"] + age_ms,
            )
            .order_by(EVENTS.c.id)
        )
        events = tuple((one.topic, one.value) for one in await tx.execute(known))
        unit = Unit(row["unit"], row["candidate"], from_epoch_ms(row["enrolled_ms"]))
        found.append(DueUnit(unit, events))
    return found


async def note(
    tx: AsyncConnection, rollout_id: str, look: Look, readings: Sequence[UnitReading], *, last: bool
) -> None:
    """Append the readings; a closed unit's events go."""
    for reading in readings:
        unit = {"rollout_id": rollout_id, "unit": reading.unit.name}
        row = {
            **unit,
            "look": look,
            "candidate": reading.unit.candidate,
            "enrolled_ms": epoch_ms(reading.unit.enrolled),
            "found": json.dumps(dict(reading.values)),
            "expected": json.dumps(dict(reading.expected)),
        }
        await tx.execute(insert(READINGS).values(row))
        counted = {"looks": UNITS.c.looks + 1, **({"events": -1} if last else {})}
        await tx.execute(update(UNITS).where(*_equal(UNITS, unit)).values(counted))
        if last:
            await tx.execute(delete(EVENTS).where(*_equal(EVENTS, unit)))


async def readings(tx: AsyncConnection, rollout_id: str, after: int, limit: int) -> list[tuple[int, Look, UnitReading]]:
    """Those that follow reading `after`, in their order."""
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


async def clear(tx: AsyncConnection, model: str, kept_max: int) -> bool:
    """Remove some of what ended rollouts leave behind; whether there is more."""
    ended = select(ROLLOUTS.c.rollout_id).where(ROLLOUTS.c.model == model, ROLLOUTS.c.phase.not_in(UNDER_WAY))
    if await remove_some(tx, EVENTS, EVENTS.c.rollout_id.in_(ended), order=EVENTS.c.id):
        return True
    for table, member in ((SESSIONS, SESSIONS.c.session_key), (UNITS, UNITS.c.unit)):
        some = select(table.c.rollout_id, member).where(table.c.rollout_id.in_(ended)).limit(AT_ONCE_MAX)
        found = (await tx.execute(some)).all()
        for rollout_id, name in found:
            await tx.execute(delete(table).where(table.c.rollout_id == rollout_id, member == name))
        if len(found) == AT_ONCE_MAX:
            return True
    old = ended.order_by(ROLLOUTS.c.number_id.desc()).limit(100_000).offset(kept_max)
    if await remove_some(tx, PROMPTS, PROMPTS.c.rollout_id.in_(old), order=PROMPTS.c.id):
        return True
    return await remove_some(tx, READINGS, READINGS.c.rollout_id.in_(old), order=READINGS.c.id)


def sessions(events: Sequence[tuple[str, bytes]]) -> list[SessionRecord]:
    """The events of a unit as records of its sessions."""
    by_session: dict[str, list[Event]] = {}
    for topic, value in events:
        event = KINDS[topic].from_stored(value)
        by_session.setdefault(event.key, []).append(event)
    return [
        SessionRecord(
            key,
            tuple(one for one in found if isinstance(one, Turn)),
            tuple(one for one in found if isinstance(one, Trajectory)),
            tuple(one for one in found if isinstance(one, Reward)),
            tuple(one for one in found if isinstance(one, Feedback)),
        )
        for key, found in by_session.items()
    ]


def _equal(table: Table, key: dict[str, str]) -> list[ColumnElement[bool]]:
    return [table.c[name] == value for name, value in key.items()]
