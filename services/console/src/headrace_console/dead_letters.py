"""Dead letters: queries for them, and the decisions of users to retry or discard them.

Each decision is published with the name of its user. A letter may be of any tenant, so only users of all tenants may
see the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.follower import RecordReader
from headrace_console.read_model.packing import pack_id, unpack_id
from headrace_console.read_model.queries import Row, first_row, numbers_of, position_of, read_rows, texts_of
from headrace_runtime.clock import Clock
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record, decode
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.tables import split_into_batches
from headrace_schemas import DeadLetter, DeadLetterDecision
from headrace_schemas.rules.training import permanent_problem, retry_headers

GROUPED_MAX = 50_000
"""Largest number of letters that the list of groups counts."""


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """Number of dead letters with the same service, source topic and reason, with the times of the first and
    last one.
    """

    service: str
    topic: str
    reason: str
    letters: int = 0
    first_ms: int = 0
    last_ms: int = 0


async def letter_groups(tx: AsyncConnection, state: str) -> list[LetterGroup]:
    """Count the dead letters in a state by service, source topic and reason.

    Args:
        tx: the transaction.
        state: one of `tables.LETTER_STATES`. At most `GROUPED_MAX` letters in this state are counted.

    Returns:
        The groups, the group with the most letters first.
    """
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
    """Return at most `limit` letters of a group in a state, the oldest first.

    They begin after `after`, the time in milliseconds and the row id of a letter; None to begin with the oldest.
    """
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
    """Return the row of the dead letter with this id, or None if the console has not read the letter."""
    table = tables.letters
    return await first_row(tx, select(table).where(table.c.name == pack_id(letter_id), table.c.log_offset >= 0))


async def refusal_reasons(tx: AsyncConnection, event_ids: Collection[str]) -> dict[str, str]:
    """Return the reason by event id for those of the events that were dead-lettered and not retried."""
    table, subjects = tables.letters, {pack_id(event_id): event_id for event_id in event_ids}
    if not subjects:
        return {}
    query = select(table.c.subject, table.c.reason).where(
        table.c.subject.in_(subjects), table.c.state != tables.LETTER_STATES.index("retried")
    )
    rows = (await tx.execute(query)).all()
    texts = await texts_of(tx, {row.reason for row in rows})
    return {subjects[bytes(row.subject)]: texts[row.reason] for row in rows}


_READ_AT_ONCE = 100
_EXPIRED = "its record has expired"


@dataclass(frozen=True, slots=True)
class PlannedLetter:
    """A dead letter, and the problem that prevents its retry, or None."""

    row: Row
    letter: DeadLetter | None = None
    """Content of the letter, if an action needs it."""
    problem: str | None = None


class DeadLetterActions:
    """Client that checks dead letters and publishes retries and discards. Its producer connects at first use."""

    def __init__(self, records: RecordReader, producer: EventProducer, blobs: BlobStore, clock: Clock) -> None:
        self._records = records
        self._producer = producer
        self._blobs = blobs
        self._clock = clock
        self._lock = asyncio.Lock()
        self._is_connected = False

    async def plan_retry(self, rows: Sequence[Row]) -> AsyncIterator[PlannedLetter]:
        """Yield each dead letter with the problem that prevents its retry, or None. No record is published.

        Raises:
            Unavailable: the bus does not answer.
        """
        for part in split_into_batches(rows, _READ_AT_ONCE):
            events = await self._records.read(DeadLetter.topic, [position_of(row) for row in part])
            for row in part:
                letter = events.get(position_of(row))
                if isinstance(letter, DeadLetter):
                    yield PlannedLetter(row, letter, await self._problem(letter))
                else:
                    yield PlannedLetter(row, problem=_EXPIRED)

    async def _problem(self, letter: DeadLetter) -> str | None:
        problem = permanent_problem(letter)
        if problem is not None:
            return problem
        try:
            await decode(_record_of(letter), self._blobs)
        except (InvalidEvent, Unavailable) as error:
            return f"would be refused again: {error}"
        return None

    async def retry(self, letters: Sequence[PlannedLetter], by: str) -> None:
        """Publish the refused records again, then one decision `retried` for each letter.

        Args:
            letters: letters in which `plan_retry` found no problem.
            by: name of the user who decided.

        Raises:
            Unavailable: the bus does not answer. Some records may have been published; consumers recognize their ids.
        """
        if letters:
            await self._connect()
            records = [await self._restore(planned.letter) for planned in letters if planned.letter is not None]
            await self._producer.send_raw(records)
            await self._decide([planned.row for planned in letters], "retried", None, by)

    async def discard(self, rows: Sequence[Row], reason: str, by: str) -> None:
        """Publish the decision that these letters will not be retried.

        Raises `Unavailable` if the bus does not answer.
        """
        if rows:
            await self._connect()
            await self._decide(rows, "discarded", reason, by)

    async def _restore(self, letter: DeadLetter) -> Outgoing:
        """Return the record that a letter contains, ready to be published on its source topic.

        A record without a key, such as one that was refused before it was published, gets the key of its event.
        """
        partitions = await self._producer.partitions(letter.source_topic)
        partition = letter.source_partition if letter.source_partition in partitions else None
        if letter.source_key:
            key = letter.source_key.encode()
        else:
            key = (await decode(_record_of(letter), self._blobs)).event.key.encode()
        headers = retry_headers(letter, keeps_partition=partition is not None)
        return Outgoing(letter.source_topic, key, letter.value, headers, partition)

    async def _decide(
        self,
        rows: Sequence[Row],
        action: Literal["retried", "discarded"],
        reason: str | None,
        by: str,
    ) -> None:
        decisions = [
            DeadLetterDecision(
                time=self._clock.now(),
                dead_letter_id=unpack_id(row["name"]),
                number=row["decisions"] + 1,
                action=action,
                reason=reason,
                by=by,
            )
            for row in rows
        ]
        await self._producer.send_raw([await self._producer.encode(decision) for decision in decisions])

    async def _connect(self) -> None:
        async with self._lock:
            if not self._is_connected:
                await self._producer.start()
                self._is_connected = True

    async def close(self) -> None:
        """Disconnect the producer from the bus."""
        await self._producer.stop()


def _record_of(letter: DeadLetter) -> Record:
    headers = tuple((name, text.encode()) for name, text in letter.headers.items())
    key = letter.source_key.encode() if letter.source_key else None
    return Record(letter.source_topic, 0, 0, key, letter.value, headers)
