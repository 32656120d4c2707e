"""The prompts of a shadow as the database keeps them, on the rollout's own clock.

Each has three units in the ledger, which no reading of a canary ever takes: the user's session, and one session for
each of the two new answers. So rewards and feedback about them find their place as those of arms do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, RowMapping, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.rollout_tables import EVENTS, PROMPTS, ROLLOUTS, SESSIONS, UNITS
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.rollouts.ledger import Membership
from headrace_runtime.upsert import upsert
from headrace_schemas import ids

Side = Literal["logged", "candidate", "champion"]
ANSWERING: tuple[Side, ...] = ("candidate", "champion")
_SIDES: tuple[Side, ...] = ("logged", *ANSWERING)
_UNIT = "shadow-"
_NEVER = -1
"""Looks of a unit that no look of a canary is due for."""


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """One row."""

    rollout_id: str
    place: int
    session_key: str
    tenant: str
    state: Literal["waiting", "answered", "read", "left_out"]
    attempts: int
    sampled_ms: int
    answered_ms: int
    tokens: int
    ended: Mapping[Side, str]
    log_weight: float | None
    found: Mapping[str, Any]
    """`reading.PromptReading` as JSON, once it was read."""
    reason: str

    def unit(self, side: Side) -> str:
        return f"{_UNIT}{self.place}-{side}"

    def session_id(self, side: Side, attempt: int) -> str:
        """Of a new answer."""
        return f"{_UNIT}{self.rollout_id}-{self.place}-{side}-{attempt}"


@dataclass(frozen=True, slots=True)
class ShadowPhase:
    """A rollout that is in the shadow, as far as a turn needs it."""

    rollout_id: str
    control: str
    plan: str
    observed_ms: int


def is_shadow(member: Membership) -> bool:
    return member.unit.startswith(_UNIT)


async def in_shadow(tx: AsyncConnection, model: str) -> list[ShadowPhase]:
    columns = ROLLOUTS.c.rollout_id, ROLLOUTS.c.control, ROLLOUTS.c.plan, ROLLOUTS.c.observed_ms
    query = select(*columns).where(ROLLOUTS.c.model == model, ROLLOUTS.c.phase == "shadow")
    return [ShadowPhase(*row) for row in await tx.execute(query.order_by(ROLLOUTS.c.number_id))]


async def taken(tx: AsyncConnection, rollout_id: str) -> tuple[int, int, int]:
    """How many prompts there are, how many of them were left out, and what all of them have cost in tokens."""
    rows = select(PROMPTS.c.state, func.count(), func.sum(PROMPTS.c.tokens)).where(PROMPTS.c.rollout_id == rollout_id)
    found = [tuple(row) for row in await tx.execute(rows.group_by(PROMPTS.c.state))]
    out = sum(count for state, count, _ in found if state == "left_out")
    return sum(count for _, count, _ in found), out, sum(int(tokens) for _, _, tokens in found)


async def add(
    tx: AsyncConnection, rollout_id: str, place: int, session_key: str, tenant: str, now_ms: int, tokens: int
) -> bool:
    """Take a user's session; False when its words have another place already."""
    session = {"rollout_id": rollout_id, "session_key": session_key}
    unit = f"{_UNIT}{place}-logged"
    if not await upsert(tx, SESSIONS, session, {"unit": unit, "tenant": tenant}, update=False):
        return False
    await _unit(tx, rollout_id, unit, now_ms)
    row = {
        **session,
        "place": place,
        "tenant": tenant,
        "state": "waiting",
        "attempts": 0,
        "sampled_ms": now_ms,
        "answered_ms": 0,
        "tokens": tokens,
        "ended": "{}",
        "log_weight": None,
        "found": "{}",
        "reason": "",
    }
    await tx.execute(insert(PROMPTS).values(row))
    return True


async def due(tx: AsyncConnection, rollout: KeptRollout, age_ms: int, limit: int) -> list[KeptPrompt]:
    """Those whose session had its time, the first ones first."""
    old = (PROMPTS.c.state == "waiting", PROMPTS.c.sampled_ms <= rollout.observed_ms - age_ms)
    return await _some(tx, rollout.rollout_id, *old, limit=limit)


async def readable(tx: AsyncConnection, rollout: KeptRollout, age_ms: int, limit: int) -> list[KeptPrompt]:
    """Answered ones of that age, strictly in their order: those behind one that is still open wait for it, for a prompt
    that is answered quickly is another kind of prompt."""
    found = []
    for one in await _some(tx, rollout.rollout_id, PROMPTS.c.state.in_(("waiting", "answered")), limit=limit):
        if one.state != "answered" or one.answered_ms > rollout.observed_ms - age_ms:
            break
        found.append(one)
    return found


async def read(tx: AsyncConnection, rollout_id: str, after: int, limit: int) -> list[KeptPrompt]:
    """Those that were read, behind that place."""
    return await _some(tx, rollout_id, PROMPTS.c.state == "read", PROMPTS.c.place > after, limit=limit)


async def every(tx: AsyncConnection, rollout_id: str, limit: int) -> list[KeptPrompt]:
    return await _some(tx, rollout_id, limit=limit)


async def begin(tx: AsyncConnection, prompt: KeptPrompt, now_ms: int) -> int | None:
    """Another attempt: its sessions are known before anybody answers. Returns its number; None: the prompt is not open
    any more, or its rollout is not in the shadow."""
    going_on = select(ROLLOUTS.c.rollout_id).where(
        ROLLOUTS.c.rollout_id == prompt.rollout_id, ROLLOUTS.c.phase == "shadow"
    )
    still = (*_row(prompt), PROMPTS.c.state == "waiting", PROMPTS.c.rollout_id.in_(going_on))
    counted = await tx.execute(update(PROMPTS).where(*still).values(attempts=PROMPTS.c.attempts + 1))
    if not counted.rowcount:
        return None
    attempt: int = (await tx.execute(select(PROMPTS.c.attempts).where(*_row(prompt)))).scalar_one()
    for side in ANSWERING:
        await _forget(tx, prompt.rollout_id, prompt.unit(side))
        await _unit(tx, prompt.rollout_id, prompt.unit(side), now_ms)
        key = ids.session_key(prompt.tenant, prompt.session_id(side, attempt))
        session = {"rollout_id": prompt.rollout_id, "session_key": key}
        await upsert(tx, SESSIONS, session, {"unit": prompt.unit(side), "tenant": prompt.tenant})
    return attempt


async def answer(
    tx: AsyncConnection,
    prompt: KeptPrompt,
    attempt: int,
    ended: Mapping[Side, str],
    tokens: int,
    log_weight: float | None,
) -> None:
    """Both answers are there. Of an attempt that another one has overtaken nothing is kept."""
    now = select(ROLLOUTS.c.observed_ms).where(ROLLOUTS.c.rollout_id == prompt.rollout_id).scalar_subquery()
    still = (*_row(prompt), PROMPTS.c.state == "waiting", PROMPTS.c.attempts == attempt)
    values = {"state": "answered", "ended": json.dumps(dict(ended)), "log_weight": log_weight}
    cost = PROMPTS.c.tokens + tokens
    await tx.execute(update(PROMPTS).where(*still).values(**values, tokens=cost, answered_ms=now))


async def leave_out(tx: AsyncConnection, prompt: KeptPrompt, reason: str) -> None:
    values = {"state": "left_out", "reason": reason}
    await tx.execute(update(PROMPTS).where(*_row(prompt), PROMPTS.c.state == "waiting").values(values))
    for side in _SIDES:
        await _close(tx, prompt.rollout_id, prompt.unit(side))


async def note(tx: AsyncConnection, prompt: KeptPrompt, found: Mapping[str, Any]) -> None:
    """It was read; what its sessions said is not needed any more."""
    await tx.execute(update(PROMPTS).where(*_row(prompt)).values(state="read", found=json.dumps(dict(found))))
    for side in _SIDES:
        await _close(tx, prompt.rollout_id, prompt.unit(side))


async def events(tx: AsyncConnection, prompt: KeptPrompt, side: Side) -> list[tuple[str, bytes]]:
    """Topic and value, in the order in which they were read."""
    of = (EVENTS.c.rollout_id == prompt.rollout_id, EVENTS.c.unit == prompt.unit(side))
    rows = await tx.execute(select(EVENTS.c.topic, EVENTS.c.value).where(*of).order_by(EVENTS.c.id))
    return [(row.topic, row.value) for row in rows]


async def close(tx: AsyncConnection, rollout_id: str) -> None:
    """The shadow is over: a session that it has taken may be drawn into an arm later, as any other."""
    for table in (SESSIONS, EVENTS, UNITS):
        await tx.execute(delete(table).where(table.c.rollout_id == rollout_id, table.c.unit.like(f"{_UNIT}%")))


def _row(prompt: KeptPrompt) -> Sequence[ColumnElement[bool]]:
    return PROMPTS.c.rollout_id == prompt.rollout_id, PROMPTS.c.place == prompt.place


async def _unit(tx: AsyncConnection, rollout_id: str, unit: str, now_ms: int) -> None:
    fresh = {"candidate": False, "enrolled_ms": now_ms, "looks": _NEVER, "events": 0}
    await upsert(tx, UNITS, {"rollout_id": rollout_id, "unit": unit}, fresh)


async def _forget(tx: AsyncConnection, rollout_id: str, unit: str) -> None:
    """What an attempt before has left."""
    for table in (SESSIONS, EVENTS):
        await tx.execute(delete(table).where(table.c.rollout_id == rollout_id, table.c.unit == unit))


async def _close(tx: AsyncConnection, rollout_id: str, unit: str) -> None:
    await tx.execute(delete(EVENTS).where(EVENTS.c.rollout_id == rollout_id, EVENTS.c.unit == unit))
    of = (UNITS.c.rollout_id == rollout_id, UNITS.c.unit == unit)
    await tx.execute(update(UNITS).where(*of).values(events=_NEVER))


async def _some(tx: AsyncConnection, rollout_id: str, *which: ColumnElement[bool], limit: int) -> list[KeptPrompt]:
    query = select(PROMPTS).where(PROMPTS.c.rollout_id == rollout_id, *which).order_by(PROMPTS.c.place).limit(limit)
    return [_kept(row) for row in (await tx.execute(query)).mappings()]


def _kept(row: RowMapping) -> KeptPrompt:
    names = ("rollout_id", "place", "session_key", "tenant", "state", "attempts", "sampled_ms", "answered_ms", "tokens")
    fields = {name: row[name] for name in (*names, "log_weight", "reason")}
    return KeptPrompt(**fields, ended=json.loads(row["ended"]), found=json.loads(row["found"]))
