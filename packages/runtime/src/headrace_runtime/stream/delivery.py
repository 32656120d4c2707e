"""Tables by which effects happen once: deduplication of events and dead letters, stored positions, held records, and
the transactional outbox.

The first functions run in the caller's transaction, which also contains the effects.

Held records are refused records of tenants with too many refusals. They wait in the database for a retry, as rows of
the table `jobs`, ordered by offset within a partition of a topic. Their number and their bytes are bounded for each
tenant.

The outbox stores the events of an effect in the transaction of the effect, and sends them afterwards. Events are sent
at least once. After a crash between acknowledgement and deletion they are sent again with the same ids, by which
consumers deduplicate them.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import RowMapping, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Received, Record
from headrace_runtime.metrics import EVENTS_HANDLED, OUTBOX_ROWS, RECORDS_HELD
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.tables import StreamTables, upsert
from headrace_schemas import DeadLetter, Event


async def select_new_letters(
    tx: AsyncConnection, tables: StreamTables, letters: Sequence[DeadLetter], now: datetime
) -> list[DeadLetter]:
    """Return the dead letters that were not stored before, and mark their ids as seen. A record has only one dead
    letter, because the id contains its offset."""
    by_id = {letter.event_id: letter for letter in letters}
    return [by_id[name] for name in await _mark_new(tx, tables, by_id, now)]


async def select_new_events(
    tx: AsyncConnection, tables: StreamTables, received: Sequence[Received], now: datetime
) -> list[Received]:
    """Return the events whose ids are new for their tenants, each id once, and mark these ids as seen."""
    with_ids = [(item.identity, item) for item in received]
    first = dict(reversed(with_ids))
    new_ids = set(await _mark_new(tx, tables, dict(with_ids), now))
    new_events = [item for name, item in with_ids if item is first[name] and name in new_ids]
    new_objects = {id(item) for item in new_events}
    for item in received:
        EVENTS_HANDLED.labels(item.record.topic, "handled" if id(item) in new_objects else "duplicate").inc()
    return new_events


async def _mark_new(
    tx: AsyncConnection, tables: StreamTables, names: dict[str, DeadLetter] | dict[str, Received], now: datetime
) -> list[str]:
    """Mark ids as seen, and return those that were not seen before, in order."""
    if not names:
        return []
    table = tables.seen
    seen = set((await tx.execute(select(table.c.event_id).where(table.c.event_id.in_(names)))).scalars())
    new = [name for name in names if name not in seen]
    if new:
        at_ms = epoch_ms(now)
        await tx.execute(insert(table), [{"event_id": name, "at_ms": at_ms} for name in new])
    return new


async def store_positions(tx: AsyncConnection, tables: StreamTables, records: Sequence[Record]) -> None:
    """Store the offsets after `records`, because the effects of these records are in this transaction."""
    next_offsets: dict[tuple[str, int], int] = {}
    for record in records:
        key = (record.topic, record.partition)
        next_offsets[key] = max(next_offsets.get(key, 0), record.offset + 1)
    for (topic, partition), offset in next_offsets.items():
        await upsert(tx, tables.positions, {"topic": topic, "partition": partition}, {"next_offset": offset})


async def read_positions(tx: AsyncConnection, tables: StreamTables, topic: str) -> dict[int, int]:
    """Return the stored offset of each partition of `topic`. The effects of all records before it are in this
    database."""
    table = tables.positions
    rows = await tx.execute(select(table.c.partition, table.c.next_offset).where(table.c.topic == topic))
    return {row.partition: row.next_offset for row in rows}


HELD_RECORDS_MAX = 10_000
"""Maximum number of held records of one tenant."""
HELD_BYTES_MAX = 64 * 1024 * 1024
"""Maximum number of bytes in the values and headers of a tenant's held records."""
_KIND = "held"
_PAGE = 100


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """Refused record that waits in the database for a retry. `name` is the id of its row."""

    name: str
    tenant: str
    record: Record


@dataclass(frozen=True, slots=True)
class RecordToHold:
    """Refused record that must be stored for a retry, because too many records of its tenant were refused."""

    record: Record
    tenant: str


class HeldRecords:
    """Refused records of one service that wait in its database for a retry, with limits for each tenant.

    Methods with `tx` run in the caller's transaction.
    """

    def __init__(self, service: str, tables: StreamTables) -> None:
        self._service = service
        self._table = tables.jobs
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._after = ""
        self.is_due = True
        """Whether held records must be retried, which is the case after a start and after `resume`."""

    def has_capacity(self, tenant: str, record: Record) -> bool:
        """Return whether one more record of the tenant may be held within the limits."""
        full = self._bytes[tenant] + _size(record) > HELD_BYTES_MAX
        return self._counts[tenant] < HELD_RECORDS_MAX and not full

    def count(self, tenant: str, record: Record) -> None:
        """Add a held record to the tenant's counters, which are compared with the limits. Call it after the transaction
        that stored the record has committed."""
        self._counts[tenant] += 1
        self._bytes[tenant] += _size(record)
        RECORDS_HELD.labels(self._service).set(sum(self._counts.values()))

    def advance(self, page: Sequence[HeldRecord]) -> None:
        """Record that the held records in `page` were retried. An empty page ends the retry."""
        self.is_due = bool(page)
        self._after = page[-1].name if page else ""

    async def hold(self, tx: AsyncConnection, tenant: str, record: Record, now: datetime) -> None:
        """Store a refused record for a retry, unless it is already stored."""
        values = {"kind": _KIND, "payload": _pack_record(tenant, record), "attempts": 0, "due_ms": epoch_ms(now)}
        await upsert(tx, self._table, {"job_id": _name(record)}, values, update=False)

    async def remove(self, tx: AsyncConnection, name: str) -> None:
        """Delete the held record whose row id is `name`."""
        await tx.execute(delete(self._table).where(self._table.c.job_id == name))

    async def page(self, database: Database) -> list[HeldRecord]:
        """Return the next held records to retry, ordered by topic, partition and offset.

        The first page resets the counters, so the caller must pass each record that stays held to `count` again.
        """
        if not self._after:
            self._counts.clear()
            self._bytes.clear()
        table = self._table
        query = select(table.c.job_id, table.c.payload).where(table.c.kind == _KIND, table.c.job_id > self._after)
        async with database.transaction() as tx:
            rows = (await tx.execute(query.order_by(table.c.job_id).limit(_PAGE))).all()
        return [HeldRecord(row.job_id, *_unpack_record(row.payload)) for row in rows]


def _name(record: Record) -> str:
    """Return a row id by which both databases sort held records by topic, partition and offset."""
    return f"held/{record.topic}/{record.partition:010d}/{record.offset:020d}"


def _size(record: Record) -> int:
    return len(record.value or b"") + sum(len(name) + len(text or b"") for name, text in record.headers)


def _pack_record(tenant: str, record: Record) -> bytes:
    fields = {
        "tenant": tenant,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "key": _to_base64(record.key),
        "value": _to_base64(record.value),
        "headers": [[name, _to_base64(text)] for name, text in record.headers],
        "timestamp_ms": record.timestamp_ms,
    }
    return json.dumps(fields).encode()


def _unpack_record(payload: bytes) -> tuple[str, Record]:
    fields = json.loads(payload)
    headers = tuple((name, _from_base64(text)) for name, text in fields["headers"])
    read_positions = fields["topic"], fields["partition"], fields["offset"]
    record = Record(
        *read_positions, _from_base64(fields["key"]), _from_base64(fields["value"]), headers, fields["timestamp_ms"]
    )
    return fields["tenant"], record


def _to_base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _from_base64(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


_SEND_AT_ONCE_MAX = 500
_ORPHAN_AGE_MS = 30_000
_REFUSED_BYTES_MAX = 65_536
_REFUSED_KEY_MAX = 512


class Outbox:
    """Outbox of one service. Call `add` in the transaction of the effect, then `mark_committed` or `mark_rolled_back`,
    then `flush`. Calls must not overlap."""

    def __init__(self, database: Database, tables: StreamTables, producer: EventProducer, clock: Clock) -> None:
        self._database = database
        self._table = tables.outbox
        self._producer = producer
        self._clock = clock
        self._added: list[tuple[int, Outgoing]] = []
        self._unsent: list[tuple[int, Outgoing]] = []
        self._acknowledged: list[int] = []

    async def encode(self, events: Sequence[Event]) -> list[Outgoing]:
        """Encode events as records with the current trace context."""
        return [await self._producer.encode(event) for event in events]

    async def add(self, tx: AsyncConnection, records: Sequence[Outgoing]) -> None:
        """Store `records` for sending, and delete rows that were acknowledged. Must be called once per transaction."""
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
        """Queue the records of the last `add` for `flush`. Call it after their transaction has committed."""
        self._unsent += self._added
        self._added = []
        self._acknowledged = []
        OUTBOX_ROWS.set(len(self._unsent))

    def mark_rolled_back(self) -> None:
        """Discard the records of the last `add`. Call it after their transaction was rolled back."""
        self._added = []

    async def flush(self) -> None:
        """Send all queued records in order. If the bus does not respond, keep them and raise `Unavailable`."""
        while self._unsent:
            batch = self._unsent[:_SEND_AT_ONCE_MAX]
            await self._send([record for _, record in batch])
            self._unsent = self._unsent[len(batch) :]
            self._acknowledged += [row for row, _ in batch]
        OUTBOX_ROWS.set(0)

    async def adopt(self, *, at_start: bool = False) -> int:
        """Send rows that crashed processes left in the outbox, and return their number. At the start these are all
        rows, later only old ones.

        If processes share a database, new rows of another process may be sent twice, which is harmless.
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
        """Send records. In place of a record that the bus refuses permanently, send a dead letter."""
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
