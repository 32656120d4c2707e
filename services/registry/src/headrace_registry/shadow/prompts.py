"""Table of the prompts of shadows. All times are those of the rollout's own clock.

Each prompt has three units in the tables of `unit_store`: the user's session, and one session for each of the two new
answers. So rewards and feedback about them are stored like those of arms, but no evaluation of a canary uses these
units.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, RowMapping, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import EVENTS, PROMPTS, ROLLOUTS, SESSIONS, UNITS
from headrace_registry.storage.unit_store import Membership
from headrace_runtime.storage.tables import upsert
from headrace_schemas.values import ids

Side = Literal["logged", "candidate", "champion"]
ANSWERING: tuple[Side, ...] = ("candidate", "champion")
_SIDES: tuple[Side, ...] = ("logged", *ANSWERING)
_UNIT = "shadow-"
_NEVER = -1
"""Value of the column `looks` for units whose metrics the canary never computes."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """Row of the table of prompts."""

    rollout_id: str
    number: int
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
    """`prompt_reader.PromptReading` as JSON, once the metrics of the prompt were computed."""
    reason: str

    def unit(self, side: Side) -> str:
        return f"{_UNIT}{self.number}-{side}"

    def session_id(self, side: Side, attempt: int) -> str:
        """Return the id of the session in which one of both versions answers the prompt in an attempt."""
        return f"{_UNIT}{self.rollout_id}-{self.number}-{side}-{attempt}"


@dataclass(frozen=True, slots=True)
class ShadowPhase:
    """Rollout in its shadow phase, with the data by which users' prompts are chosen for it."""

    rollout_id: str
    control: str
    plan: str
    observed_ms: int


def is_shadow(member: Membership) -> bool:
    return member.unit.startswith(_UNIT)


async def shadow_phases(tx: AsyncConnection, model: str) -> list[ShadowPhase]:
    columns = ROLLOUTS.c.rollout_id, ROLLOUTS.c.control, ROLLOUTS.c.plan, ROLLOUTS.c.observed_ms
    query = select(*columns).where(ROLLOUTS.c.model == model, ROLLOUTS.c.phase == "shadow")
    return [ShadowPhase(*row) for row in await tx.execute(query.order_by(ROLLOUTS.c.number_id))]


async def prompt_totals(tx: AsyncConnection, rollout_id: str) -> tuple[int, int, int]:
    """Return the number of a shadow's prompts, how many of them were left out, and how many tokens were sampled for all
    of them."""
    rows = select(PROMPTS.c.state, func.count(), func.sum(PROMPTS.c.tokens)).where(PROMPTS.c.rollout_id == rollout_id)
    counts = [tuple(row) for row in await tx.execute(rows.group_by(PROMPTS.c.state))]
    left_out = sum(count for state, count, _ in counts if state == "left_out")
    return sum(count for _, count, _ in counts), left_out, sum(int(tokens) for _, _, tokens in counts)


async def add_prompt(
    tx: AsyncConnection, rollout_id: str, number: int, session_key: str, tenant: str, now_ms: int, tokens: int
) -> bool:
    """Add a user's session as a prompt of the shadow. Return False if the session already belongs to a prompt."""
    session = {"rollout_id": rollout_id, "session_key": session_key}
    unit = f"{_UNIT}{number}-logged"
    if not await upsert(tx, SESSIONS, session, {"unit": unit, "tenant": tenant}, update=False):
        return False
    await _unit(tx, rollout_id, unit, now_ms)
    row = {
        **session,
        "place": number,
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


async def due_prompts(tx: AsyncConnection, rollout: RolloutRecord, age_ms: int, limit: int) -> list[PromptRecord]:
    """Return up to `limit` prompts, in order, that were not answered yet and were added at least `age_ms` ago. By then
    the user's session could continue."""
    conditions = (PROMPTS.c.state == "waiting", PROMPTS.c.sampled_ms <= rollout.observed_ms - age_ms)
    return await _select(tx, rollout.rollout_id, *conditions, limit=limit)


async def readable_prompts(tx: AsyncConnection, rollout: RolloutRecord, age_ms: int, limit: int) -> list[PromptRecord]:
    """Return up to `limit` prompts, strictly in order, whose metrics were not computed yet and that were answered at
    least `age_ms` ago.

    A prompt is not returned before all earlier prompts, because prompts that are answered quickly may differ from
    others.
    """
    answered = []
    for prompt in await _select(tx, rollout.rollout_id, PROMPTS.c.state.in_(("waiting", "answered")), limit=limit):
        if prompt.state != "answered" or prompt.answered_ms > rollout.observed_ms - age_ms:
            break
        answered.append(prompt)
    return answered


async def read_prompts(tx: AsyncConnection, rollout_id: str, after: int, limit: int) -> list[PromptRecord]:
    """Return up to `limit` prompts with numbers above `after` whose metrics are stored."""
    return await _select(tx, rollout_id, PROMPTS.c.state == "read", PROMPTS.c.place > after, limit=limit)


async def all_prompts(tx: AsyncConnection, rollout_id: str, limit: int) -> list[PromptRecord]:
    """Return up to `limit` prompts of the rollout, in order."""
    return await _select(tx, rollout_id, limit=limit)


async def begin_attempt(tx: AsyncConnection, prompt: PromptRecord, now_ms: int) -> int | None:
    """Begin another attempt to answer a prompt, and return the number of the attempt. The session keys of its answers
    are stored before the bus has any record of these sessions.

    Returns None if the prompt does not wait for answers any more, or if its rollout is not in the shadow any more.
    """
    active = select(ROLLOUTS.c.rollout_id).where(
        ROLLOUTS.c.rollout_id == prompt.rollout_id, ROLLOUTS.c.phase == "shadow"
    )
    conditions = (*_row(prompt), PROMPTS.c.state == "waiting", PROMPTS.c.rollout_id.in_(active))
    updated = await tx.execute(update(PROMPTS).where(*conditions).values(attempts=PROMPTS.c.attempts + 1))
    if not updated.rowcount:
        return None
    attempt: int = (await tx.execute(select(PROMPTS.c.attempts).where(*_row(prompt)))).scalar_one()
    for side in ANSWERING:
        await _forget(tx, prompt.rollout_id, prompt.unit(side))
        await _unit(tx, prompt.rollout_id, prompt.unit(side), now_ms)
        key = ids.session_key(prompt.tenant, prompt.session_id(side, attempt))
        session = {"rollout_id": prompt.rollout_id, "session_key": key}
        await upsert(tx, SESSIONS, session, {"unit": prompt.unit(side), "tenant": prompt.tenant})
    return attempt


async def record_answers(
    tx: AsyncConnection,
    prompt: PromptRecord,
    attempt: int,
    ended: Mapping[Side, str],
    tokens: int,
    log_weight: float | None,
) -> None:
    """Store how both versions have answered a prompt. If a later attempt has begun, nothing is stored."""
    now = select(ROLLOUTS.c.observed_ms).where(ROLLOUTS.c.rollout_id == prompt.rollout_id).scalar_subquery()
    conditions = (*_row(prompt), PROMPTS.c.state == "waiting", PROMPTS.c.attempts == attempt)
    values = {"state": "answered", "ended": json.dumps(dict(ended)), "log_weight": log_weight}
    cost = PROMPTS.c.tokens + tokens
    await tx.execute(update(PROMPTS).where(*conditions).values(**values, tokens=cost, answered_ms=now))


async def leave_out(tx: AsyncConnection, prompt: PromptRecord, reason: str) -> None:
    values = {"state": "left_out", "reason": reason}
    await tx.execute(update(PROMPTS).where(*_row(prompt), PROMPTS.c.state == "waiting").values(values))
    for side in _SIDES:
        await _close(tx, prompt.rollout_id, prompt.unit(side))


async def record_reading(tx: AsyncConnection, prompt: PromptRecord, reading: Mapping[str, Any]) -> None:
    """Store the metrics of a prompt, and delete the stored events of its three sessions."""
    await tx.execute(update(PROMPTS).where(*_row(prompt)).values(state="read", found=json.dumps(dict(reading))))
    for side in _SIDES:
        await _close(tx, prompt.rollout_id, prompt.unit(side))


async def side_events(tx: AsyncConnection, prompt: PromptRecord, side: Side) -> list[tuple[str, bytes]]:
    """Return topic and value of each stored event of one of the prompt's sessions, in the order in which they were
    read.

    Args:
        side: which session: the candidate's, the champion's or the user's own (`logged`).
    """
    conditions = (EVENTS.c.rollout_id == prompt.rollout_id, EVENTS.c.unit == prompt.unit(side))
    rows = await tx.execute(select(EVENTS.c.topic, EVENTS.c.value).where(*conditions).order_by(EVENTS.c.id))
    return [(row.topic, row.value) for row in rows]


async def release_sessions(tx: AsyncConnection, rollout_id: str) -> None:
    """Delete the rows about the sessions of a shadow, so that these sessions may take part in a rollout later."""
    for table in (SESSIONS, EVENTS, UNITS):
        await tx.execute(delete(table).where(table.c.rollout_id == rollout_id, table.c.unit.like(f"{_UNIT}%")))


def _row(prompt: PromptRecord) -> Sequence[ColumnElement[bool]]:
    return PROMPTS.c.rollout_id == prompt.rollout_id, PROMPTS.c.place == prompt.number


async def _unit(tx: AsyncConnection, rollout_id: str, unit: str, now_ms: int) -> None:
    fresh = {"candidate": False, "enrolled_ms": now_ms, "looks": _NEVER, "events": 0, "event_bytes": 0}
    await upsert(tx, UNITS, {"rollout_id": rollout_id, "unit": unit}, fresh)


async def _forget(tx: AsyncConnection, rollout_id: str, unit: str) -> None:
    """Delete the rows of an earlier attempt about one of the prompt's sessions."""
    for table in (SESSIONS, EVENTS):
        await tx.execute(delete(table).where(table.c.rollout_id == rollout_id, table.c.unit == unit))


async def _close(tx: AsyncConnection, rollout_id: str, unit: str) -> None:
    await tx.execute(delete(EVENTS).where(EVENTS.c.rollout_id == rollout_id, EVENTS.c.unit == unit))
    conditions = (UNITS.c.rollout_id == rollout_id, UNITS.c.unit == unit)
    await tx.execute(update(UNITS).where(*conditions).values(events=_NEVER))


async def _select(tx: AsyncConnection, rollout_id: str, *which: ColumnElement[bool], limit: int) -> list[PromptRecord]:
    query = select(PROMPTS).where(PROMPTS.c.rollout_id == rollout_id, *which).order_by(PROMPTS.c.place).limit(limit)
    return [_record(row) for row in (await tx.execute(query)).mappings()]


def _record(row: RowMapping) -> PromptRecord:
    names = ("rollout_id", "session_key", "tenant", "state", "attempts", "sampled_ms", "answered_ms", "tokens")
    fields = {name: row[name] for name in (*names, "log_weight", "reason")}
    return PromptRecord(**fields, number=row["place"], ended=json.loads(row["ended"]), found=json.loads(row["found"]))
