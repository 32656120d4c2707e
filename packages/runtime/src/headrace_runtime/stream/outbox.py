"""Transactional outbox: an effect commits together with its events, which are published afterwards.

Events are sent at least once. After a crash between acknowledgement and deletion they are sent again with the same ids,
and consumers deduplicate them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import RowMapping, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record
from headrace_runtime.metrics import OUTBOX_ROWS
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.tables import StreamTables
from headrace_schemas import Event

_SEND_AT_ONCE_MAX = 500
_ORPHAN_AGE_MS = 30_000
_REFUSED_BYTES_MAX = 65_536
_REFUSED_KEY_MAX = 512


class Outbox:
    """Outbox of one service. Call `add` in the transaction of the effect and `flush` after it, not concurrently."""

    def __init__(self, database: Database, tables: StreamTables, producer: EventProducer, clock: Clock) -> None:
        self._database = database
        self._table = tables.outbox
        self._producer = producer
        self._clock = clock
        self._added: list[tuple[int, Outgoing]] = []
        self._unsent: list[tuple[int, Outgoing]] = []
        self._acknowledged: list[int] = []

    async def encode(self, events: Sequence[Event]) -> list[Outgoing]:
        """Return the records of `events`, with the current trace context."""
        return [await self._producer.encode(event) for event in events]

    async def add(self, tx: AsyncConnection, records: Sequence[Outgoing]) -> None:
        """Store `records` in `tx` for sending, and delete acknowledged rows. Must be called once per transaction."""
        if self._acknowledged:
            await tx.execute(delete(self._table).where(self._table.c.id.in_(self._acknowledged)))
        if records:
            now = epoch_ms(self._clock.now())
            # SQLite numbers the rows of a statement in their order; SQLAlchemy would insert them one by one to be sure
            by_parameter = tx.dialect.name != "sqlite"
            inserting = insert(self._table).returning(self._table.c.id, sort_by_parameter_order=by_parameter)
            rows = await tx.execute(inserting, [{**_row(record), "at_ms": now} for record in records])
            self._added = list(zip(sorted(rows.scalars()), records, strict=True))

    def mark_committed(self) -> None:
        """Queue the records of the last `add` for `flush`, because their transaction has committed."""
        self._unsent += self._added
        self._added = []
        self._acknowledged = []
        OUTBOX_ROWS.set(len(self._unsent))

    def mark_rolled_back(self) -> None:
        """Discard the records of the last `add`, whose transaction was rolled back."""
        self._added = []

    async def flush(self) -> None:
        """Send all unsent records in order. If the bus does not respond, keep them and raise `Unavailable`."""
        while self._unsent:
            batch = self._unsent[:_SEND_AT_ONCE_MAX]
            await self._send([record for _, record in batch])
            self._unsent = self._unsent[len(batch) :]
            self._acknowledged += [row for row, _ in batch]
        OUTBOX_ROWS.set(0)

    async def adopt(self, *, at_start: bool = False) -> int:
        """Send the rows of crashed processes: all rows at the start, later only old ones. Return their number.

        On a shared database new rows of another replica may be sent, too, which is harmless.
        """
        await self.flush()
        table = self._table
        query = select(table).order_by(table.c.id).limit(_SEND_AT_ONCE_MAX)
        if not at_start:
            query = query.where(table.c.at_ms < epoch_ms(self._clock.now()) - _ORPHAN_AGE_MS)
        adopted = 0
        while True:
            async with self._database.transaction() as tx:
                if self._acknowledged:
                    await tx.execute(delete(table).where(table.c.id.in_(self._acknowledged)))
                rows = (await tx.execute(query)).mappings().all()
            self._acknowledged = []
            if not rows:
                return adopted
            await self._send([_outgoing(row) for row in rows])
            self._acknowledged = [row["id"] for row in rows]
            adopted += len(rows)

    async def _send(self, records: Sequence[Outgoing]) -> None:
        """Send records. A record that the bus refuses permanently is replaced by a dead letter."""
        try:
            await self._producer.send_raw(records)
        except InvalidEvent:
            for record in records:
                try:
                    await self._producer.send_raw([record])
                except InvalidEvent as error:
                    value = (record.value or b"")[:_REFUSED_BYTES_MAX]
                    refused = Record(record.topic, -1, -1, record.key[:_REFUSED_KEY_MAX], value)
                    letter = dead_letter(self._producer.source, refused, error.reason, str(error))
                    await self._producer.send_raw([await self._producer.encode(letter)])


def _row(record: Outgoing) -> dict[str, object]:
    headers = json.dumps([[name, value.decode()] for name, value in record.headers]).encode()
    return {
        "topic": record.topic,
        "key": record.key,
        "value": record.value,
        "headers": headers,
        "partition": record.partition,
    }


def _outgoing(row: RowMapping) -> Outgoing:
    headers = tuple((name, value.encode()) for name, value in json.loads(row["headers"]))
    return Outgoing(row["topic"], row["key"], row["value"], headers, row["partition"])
