"""A stream service without Kafka and Faust: its processor on a real database, a bus in memory, a manual clock.

`Bench.deliver` passes a batch from the bus to the service; `Bench.sent` returns the service's output.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.processor import Handler, Processor, ProcessorLimits, Step
from headrace_schemas import Event, Reward
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX, BlobRef
from headrace_schemas.values.ids import giver_of
from tests.support.remembered import make_tables
from tests.support.turns import START

E = TypeVar("E", bound=Event)
if not structlog.is_configured():  # structlog's own default renders tracebacks with colours, which takes 0.5 s each
    structlog.configure(processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()])


class _Abort(Exception):
    pass


class ManualClock:
    """Clock that stands still until `advance`; sleeping advances it."""

    def __init__(self) -> None:
        self.at = START

    def now(self) -> datetime:
        return self.at

    def monotonic_s(self) -> float:
        return (self.at - START).total_seconds()

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


class MemoryProducer(EventProducer):
    """Producer that stores its events. `fail(n)` makes the next n sends fail, as during an outage of the bus."""

    def __init__(self, blobs: BlobStore) -> None:
        super().__init__(Common().bus, "test", blobs)
        self.records: list[Outgoing] = []
        self._failures = 0

    def fail(self, times: int) -> None:
        self._failures = times

    async def send_raw(self, records: Iterable[Outgoing]) -> None:
        if self._failures:
            self._failures -= 1
            raise Unavailable("the bus is away")
        self.records += records


@dataclass
class Service:
    """Parts of `headrace_runtime.stream.stream_service.StreamService` for tests.

    Without `package` the tables are created without migrations.
    """

    tables: StreamTables
    handlers: Mapping[str, Handler]
    package: str | None = None
    ends_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    after_batch: Step | None = None
    limits: ProcessorLimits = field(default_factory=lambda: ProcessorLimits(retry_s=10.0))


def producer_of(event: Event) -> str:
    """Return the name of the producer of an event: for a reward its service, otherwise a service of ours."""
    giver = giver_of(event.source) if isinstance(event, Reward) else None
    return f"headrace/{giver or 'test'}"


@dataclass
class Bench:
    """One running service. `log` is the bus: produced records per topic and partition, including undelivered ones."""

    processor: Processor
    producer: MemoryProducer
    clock: ManualClock
    log: dict[str, dict[int, list[Record]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def produce(self, *events: Event, partition: int = 0) -> list[Record]:
        """Append events to the bus without delivery."""
        return [self.append(event.topic, event.to_json(), event, partition=partition) for event in events]

    def append(
        self,
        topic: str,
        value: bytes | None,
        event: Event | None = None,
        *,
        partition: int = 0,
        producer: str | None = None,
    ) -> Record:
        """Append bytes as a record. `event` supplies key and headers if present, and `producer` names the sender."""
        records = self.log[topic][partition]
        dataref = None
        if value is not None and len(value) > PAYLOAD_BYTES_MAX:
            ref = self.processor.blobs.put(value)
            value, dataref = ref.model_dump_json().encode(), ref.uri
        headers = Envelope.of(event, producer or producer_of(event), dataref=dataref).headers() if event else ()
        key = event.key.encode() if event else None
        records.append(Record(topic, partition, len(records), key, value, headers))
        return records[-1]

    async def deliver(self, *events: Event | Record, partition: int = 0) -> None:
        """Deliver one batch. Events are first appended to the bus; records are there already."""
        batch = [e if isinstance(e, Record) else self.produce(e, partition=partition)[0] for e in events]
        await self.processor.process(batch)

    async def step(self, work: Step) -> None:
        await self.processor.step(work)

    def sent(self, event: type[E]) -> list[E]:
        """Return the published events of a topic, in order."""
        return [event.from_json(self._value(record)) for record in self.producer.records if record.topic == event.topic]

    def _value(self, record: Outgoing) -> bytes:
        assert record.value is not None
        if any(name == "ce_dataref" for name, _ in record.headers):
            return self.processor.blobs.get(BlobRef.model_validate_json(record.value))
        return record.value

    def forget_sent(self) -> None:
        self.producer.records.clear()

    async def ends(self, topic: str) -> Mapping[int, int]:
        return {number: len(self.log[topic][number]) for number in range(4)}

    @contextlib.asynccontextmanager
    async def aborted(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that is rolled back at the end of the block."""
        with contextlib.suppress(_Abort):
            async with self.processor.database.transaction() as tx:
                yield tx
                raise _Abort

    async def count(self, table: str) -> int:
        async with self.processor.database.transaction() as tx:
            rows: int = (await tx.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one()
        return rows


@contextlib.asynccontextmanager
async def bench(service: Service, url: str, data_dir: Path, clock: ManualClock | None = None) -> AsyncIterator[Bench]:
    """Run a service on a new database at `url` (the setting `database.url`)."""
    name = f"t{uuid.uuid4().hex[:12]}"
    common = Common.model_validate({"data_dir": data_dir, "database": {"url": url}})
    database = Database.open(name, common)
    await _make_tables(service, database)
    blobs = BlobStore.open(common)
    producer = MemoryProducer(blobs)
    clock = clock or ManualClock()
    processor = Processor(
        service="test",
        handlers=service.handlers,
        database=database,
        tables=service.tables,
        outbox=Outbox(database, service.tables, producer, clock),
        blobs=blobs,
        clock=clock,
        limits=service.limits,
        ends_of=service.ends_of,
        after_batch=service.after_batch,
    )
    service_bench = Bench(processor, producer, clock)
    processor.ends = service_bench.ends
    try:
        yield service_bench
    finally:
        if database.schema:
            async with database.transaction() as tx:
                await tx.execute(text(f'DROP SCHEMA "{database.schema}" CASCADE'))
        await database.close()


async def _make_tables(service: Service, database: Database) -> None:
    if service.package:
        return await make_tables(database, service.package)
    async with database.transaction() as tx:
        if database.schema:
            await tx.execute(text(f'CREATE SCHEMA "{database.schema}"'))
        await tx.run_sync(service.tables.seen.metadata.create_all)
    return None
