"""Queries of dead letters. A letter may be of any tenant, so only users of all tenants may see the results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.packing import pack_id
from headrace_console.read_model.queries import Row, first_row, numbers_of, read_rows, texts_of

GROUPED_MAX = 50_000
"""Largest number of letters that the list of groups counts."""


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """Letters with the same service, source topic and reason."""

    service: str
    topic: str
    reason: str
    letters: int = 0
    first_ms: int = 0
    last_ms: int = 0


async def letter_groups(tx: AsyncConnection, state: str) -> list[LetterGroup]:
    """Return the groups of letters in a state, the largest first."""
    table = tables.letters
    kind = table.c.service, table.c.topic, table.c.reason
    rows = select(*kind, table.c.at_ms).where(_is_in(state)).limit(GROUPED_MAX).subquery()
    columns = rows.c.service, rows.c.topic, rows.c.reason
    query = select(*columns, func.count().label("letters"), func.min(rows.c.at_ms), func.max(rows.c.at_ms))
    groups = (await tx.execute(query.group_by(*columns))).all()
    texts = await texts_of(tx, {number for group in groups for number in group[:3]})
    named = [
        LetterGroup(texts[service], texts[topic], texts[reason], letters, first_ms, last_ms)
        for service, topic, reason, letters, first_ms, last_ms in groups
    ]
    return sorted(named, key=lambda group: (-group.letters, group.service, group.topic, group.reason))


async def letters_of(
    tx: AsyncConnection, group: LetterGroup, state: str, *, after: tuple[int, int] | None, limit: int
) -> Sequence[Row]:
    """Return the letters of a group in a state that follow the position `after`, the oldest first."""
    table, names = tables.letters, (group.service, group.topic, group.reason)
    numbers = await numbers_of(tx, names)
    if not all(name in numbers for name in names):
        return []
    service, topic, reason = (numbers[name] for name in names)
    query = select(table).where(
        _is_in(state), table.c.service == service, table.c.topic == topic, table.c.reason == reason
    )
    if after is not None:
        query = query.where(tuple_(table.c.at_ms, table.c.id) > tuple_(*after))
    return await read_rows(tx, query.order_by(table.c.at_ms, table.c.id).limit(limit))


def _is_in(state: str) -> ColumnElement[bool]:
    table = tables.letters
    return (table.c.state == tables.LETTER_STATES.index(state)) & (table.c.log_offset >= 0)


async def letter_of(tx: AsyncConnection, letter_id: str) -> Row | None:
    """Return the letter with this id, or None."""
    table = tables.letters
    return await first_row(tx, select(table).where(table.c.name == pack_id(letter_id), table.c.log_offset >= 0))


async def refusal_reasons(tx: AsyncConnection, event_ids: Collection[str]) -> dict[str, str]:
    """Return the reason of the refusal, by event id, for those events that were dead-lettered and not retried."""
    table, subjects = tables.letters, {pack_id(event_id): event_id for event_id in event_ids}
    if not subjects:
        return {}
    query = select(table.c.subject, table.c.reason).where(
        table.c.subject.in_(subjects), table.c.state != tables.LETTER_STATES.index("retried")
    )
    rows = (await tx.execute(query)).all()
    texts = await texts_of(tx, {row.reason for row in rows})
    return {subjects[bytes(row.subject)]: texts[row.reason] for row in rows}
