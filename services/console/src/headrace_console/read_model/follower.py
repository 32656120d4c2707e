"""Readers of the bus: one applies all records of the topics to the read model, another reads single records by offset.

They use no consumer group. The position on each partition is stored in the database, in the transaction that applies
the records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.queries import Row, position_of
from headrace_console.read_model.retention import delete_expired
from headrace_console.read_model.row_sets import upsert_all, with_pauses
from headrace_console.read_model.rows import Names
from headrace_console.service import INFO
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.consumer import consumer, partitions_of, record_of
from headrace_runtime.kafka.wire import BatchDecoder, Record
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.isolation import is_fatal, reason_of
from headrace_schemas import Event, Replica

log = get_logger(__name__)
TOPICS = tuple(topic for topic in INFO.consumes if topic != Replica.topic)
_READS_MAX = 8
"""Largest number of concurrent reads of a `RecordReader`."""
_READ_TIMEOUT_S = 10.0
"""Longest time of one read, the wait for its turn included. Pages then show what they have without it."""
_BATCH_MAX = 100
"""Largest number of records of one transaction on SQLite, where pages wait for the transaction."""
_BATCH_FACTOR = 10
"""Factor of this number on PostgreSQL. Larger batches are faster, because a row that several records change is written
once."""
_RETENTION_INTERVAL_S = 60.0
_RECONNECT_S = 0.5
_LOCK = 0x636F6E73  # "cons"; key of PostgreSQL's lock for the process that writes
_POLL_MS = 1_000
_READ_MS = 2_000
_GATHER_S = 0.25
"""Pause in which records gather, because a transaction has dozens of statements for one record as for a hundred."""
_FETCH_WAIT_MS = 10
"""Time for which the bus holds a fetch request if it has no records. The next read must wait for this request."""


@dataclass(eq=False)
class TopicFollower:
    """Consumer that applies each record of `TOPICS` once to the read model.

    `following` is set while it is connected.
    """

    bus: BusSettings
    database: Database
    blobs: BlobStore
    clock: Clock
    changed: Callable[[Collection[str]], None]
    """Function that is called after each batch with the topics of the batch's records."""
    _: KW_ONLY
    titles: bool
    """Whether the first characters of each session are stored."""
    retention_days: int
    """Days for which sessions are stored."""
    following: asyncio.Event = field(default_factory=asyncio.Event)
    _checks_retention_at_s: float = 0.0
    _names: Names = field(default_factory=Names)

    async def run(self) -> None:
        """Read the topics and apply their records until cancelled. Reconnects after a failure of the bus, the database
        or the blob store.
        """
        while True:
            reader = consumer(self.bus, "headrace-console")
            try:
                await self._connect(reader)
                while True:
                    batches = await reader.getmany(timeout_ms=_POLL_MS, max_records=batch_max(self.database))
                    records = [record_of(message) for messages in batches.values() for message in messages]
                    if records:
                        await self.process(records)
                    if self.clock.monotonic_s() >= self._checks_retention_at_s:
                        await self.delete_expired()
                    if 0 < len(records) < batch_max(self.database):
                        await self.clock.sleep(_GATHER_S)
            except (KafkaError, OSError, Unavailable) as error:
                log.warning("reader_reconnects", error=repr(error))
            finally:
                self.following.clear()
                await reader.stop()
            await self.clock.sleep(_RECONNECT_S)

    async def _connect(self, reader: AIOKafkaConsumer) -> None:
        await reader.start()
        partitions = [partition for topic in TOPICS for partition in await partitions_of(reader, topic)]
        reader.assign(partitions)
        async with self.database.transaction() as tx:
            reached = await _positions(tx)
        for partition in partitions:
            reader.seek(partition, reached.get((partition.topic, partition.partition), 0))
        self.following.set()

    async def process(self, records: Sequence[Record]) -> None:
        """Apply records and store their positions in one transaction. Records before a stored position are skipped.

        A record that cannot be decoded has no effect, because the service that consumes it dead-letters it. A record
        that cannot be applied is logged and skipped, so that it does not stop the others.
        """
        decoder = BatchDecoder(self.clock)
        events = [await self._decode(record, decoder) async for record in with_pauses(records)]
        try:
            await self._commit(records, events)
        except Exception as error:
            if is_fatal(error):
                raise
            log.warning("batch_split", error=reason_of(error), size=len(records))
            for record, event in zip(records, events, strict=True):
                await self._commit_alone(record, event)
        self.changed({record.topic for record in records})

    async def delete_expired(self) -> None:
        """Delete a portion of the expired rows when the time for it has come.

        The next portion is due after a minute, or at once if more rows have expired.

        A failure is logged and does not stop the reading.
        """
        try:
            async with self.database.transaction() as tx:
                await _positions(tx, locked=True)
                more = await delete_expired(tx, self._names, day=self._day(), retention_days=self.retention_days)
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("deletion_failed", error=reason_of(error))
            more = False
        if not more:
            self._checks_retention_at_s = self.clock.monotonic_s() + _RETENTION_INTERVAL_S

    def _day(self) -> int:
        return epoch_ms(self.clock.now()) // tables.DAY_MS

    async def _decode(self, record: Record, decoder: BatchDecoder) -> Event | None:
        try:
            return (await decoder.decode(record, self.blobs)).event
        except InvalidEvent:
            return None

    async def _commit_alone(self, record: Record, event: Event | None) -> None:
        try:
            await self._commit([record], [event])
        except Exception as error:
            if is_fatal(error):
                raise
            position = f"{record.topic}[{record.partition}]@{record.offset}"
            log.exception("record_skipped", record=position, error=reason_of(error))
            await self._commit([record], [None])

    async def _commit(self, records: Sequence[Record], events: Sequence[Event | None]) -> None:
        async with self.database.transaction() as tx:
            reached = await _positions(tx, locked=True)
            log_events = [
                LogEvent(event, record.partition, record.offset)
                for record, event in zip(records, events, strict=True)
                if event is not None and record.offset >= reached.get((record.topic, record.partition), 0)
            ]
            await Batch(tx, self._names, titles=self.titles, day=self._day()).apply(log_events)
            for record in records:
                partition = record.topic, record.partition
                reached[partition] = max(reached.get(partition, 0), record.offset + 1)
            changed = {(record.topic, record.partition) for record in records}
            rows = [
                {"topic": topic, "partition": partition, "next_offset": reached[topic, partition]}
                for topic, partition in sorted(changed)
            ]
            await upsert_all(tx, tables.positions, ("topic", "partition"), rows)


def batch_max(database: Database) -> int:
    """Return the largest number of records of one transaction."""
    return _BATCH_MAX * (1 if database.sqlite else _BATCH_FACTOR)


async def _positions(tx: AsyncConnection, *, locked: bool = False) -> dict[tuple[str, int], int]:
    """Return the next offset by topic and partition.

    Args:
        locked: whether to lock out other writing processes until the transaction ends.
    """
    if locked and tx.dialect.name == "postgresql":  # SQLite has one writer at a time
        await tx.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    rows = await tx.execute(select(tables.positions))
    return {(row.topic, row.partition): row.next_offset for row in rows}


class RecordReader:
    """Reader of single events by topic, partition and offset.

    A few reads run at the same time, each on a connection of its own, and a slow one is given up: it must not hold the
    pages that need other records.
    """

    def __init__(self, bus: BusSettings, blobs: BlobStore, clock: Clock) -> None:
        self._bus = bus
        self._blobs = blobs
        self._clock = clock
        self._slots = asyncio.Semaphore(_READS_MAX)
        self._idle: list[AIOKafkaConsumer] = []
        """Connections that no read uses now."""
        self._stopping: set[asyncio.Task[None]] = set()

    async def read(self, topic: str, positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Event]:
        """Return the events at these partitions and offsets. Events that have expired or cannot be decoded are absent.

        Raises:
            Unavailable: the bus or the blob store does not answer in time.
        """
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S), self._slots:
                return await self._read_connected(topic, positions)
        except (KafkaError, OSError) as error:
            raise Unavailable(f"bus {self._bus.address}: {error!r}") from error

    async def _read_connected(self, topic: str, positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Event]:
        reader = self._idle.pop() if self._idle else await self._connect()
        try:
            events = await self._read(reader, topic, positions)
        except BaseException:
            self._stop(reader)
            raise
        self._idle.append(reader)
        return events

    async def read_rows(self, topic: str, rows: Sequence[Row]) -> Mapping[tuple[int, int], Event]:
        """Return the events at the topic positions of rows, by partition and offset.

        If the bus does not answer, return an empty mapping, so that a page can show everything else.
        """
        try:
            return await self.read(topic, [position_of(row) for row in rows]) if rows else {}
        except Unavailable:
            return {}

    async def read_row(self, topic: str, row: Row) -> Event | None:
        """Return the event at the topic position that a row stores, or None if it has expired or the bus does not
        answer.
        """
        return (await self.read_rows(topic, [row])).get(position_of(row))

    async def _read(
        self, reader: AIOKafkaConsumer, topic: str, positions: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], Event]:
        events: dict[tuple[int, int], Event] = {}
        decoder = BatchDecoder(self._clock)
        for number in sorted({partition for partition, _ in positions}):
            partition = TopicPartition(topic, number)
            reader.assign([partition])
            begin = (await reader.beginning_offsets([partition]))[partition]
            end = (await reader.end_offsets([partition]))[partition]
            offsets = {offset for part, offset in positions if part == number and begin <= offset < end}
            for _, pairs in groupby(enumerate(sorted(offsets)), lambda pair: pair[1] - pair[0]):
                consecutive = [offset for _, offset in pairs]
                first, last = consecutive[0], consecutive[-1]
                reader.seek(partition, first)
                reached = first
                while reached <= last:
                    batches = await reader.getmany(partition, timeout_ms=_READ_MS, max_records=last - reached + 1)
                    messages = batches.get(partition, ())
                    if not messages:
                        break
                    reached = messages[-1].offset + 1
                    for message in messages:
                        if message.offset in offsets:
                            with contextlib.suppress(InvalidEvent):
                                received = await decoder.decode(record_of(message), self._blobs)
                                events[number, message.offset] = received.event
            reader.pause(partition)  # otherwise the reader requests the records after the last one all the time
        return events

    async def _connect(self) -> AIOKafkaConsumer:
        reader = consumer(
            self._bus, "headrace-console-records", fetch_max_bytes=1_048_576, fetch_max_wait_ms=_FETCH_WAIT_MS
        )
        try:
            await reader.start()
        except BaseException:
            self._stop(reader)
            raise
        return reader

    def _stop(self, reader: AIOKafkaConsumer) -> None:
        """Close a connection in a task, because a bus that does not answer delays it."""
        task = asyncio.create_task(reader.stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """Disconnect from the bus."""
        while self._idle:
            self._stop(self._idle.pop())
        await asyncio.gather(*self._stopping, return_exceptions=True)
