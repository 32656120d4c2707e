"""Stream services without Kafka and Faust, on a real database with a bus in memory, and the judge with a fake model."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import structlog
from prometheus_client import REGISTRY
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_judge import app
from headrace_judge.settings import JudgeSettings
from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.processor import Handler, Processor, ProcessorLimits, Step
from headrace_runtime.stream.stream_service import StreamService
from headrace_schemas import Branch, Dialogue, Event, Message, Reward, Span, Trajectory
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX, BlobRef
from headrace_schemas.values.ids import reserved_producer, session_key
from tests.support.fake_llm import FakeLLM
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
    reserved = reserved_producer(event.source) if isinstance(event, Reward) else None
    return f"headrace/{reserved or 'test'}"


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


WAIT_S = 20.0


def settings(llm: FakeLLM | str, **changes: Any) -> JudgeSettings:
    """Return settings of a judge that calls `llm`. `changes` are merged by section."""
    base_url = llm if isinstance(llm, str) else llm.base_url
    data: dict[str, Any] = {"endpoint": {"base_url": base_url, "model": "judge-1", "timeout_s": 5.0}}
    for name, value in changes.items():
        data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) else value
    return JudgeSettings.model_validate(data)


def said(*messages: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message.model_validate({"role": role, "content": content}) for role, content in messages)


def trajectory(name: str, answer: str = "Ada", **changes: Any) -> Trajectory:
    """Return a run of one question and one answer. The judge cannot distinguish runs with equal answers."""
    messages = changes.pop("messages", None) or said(("user", "Who sent the invoice?"), ("assistant", answer))
    span = Span(start=1, logprobs=(-0.5,), turn_id=f"turn-{name}", version="agent@0123456789ab")
    fields: dict[str, Any] = {
        "time": START,
        "trajectory_id": name,
        "session_key": session_key("default", name),
        "session_id": name,
        "model": "agent",
        "branches": (Branch(token_ids=(1, 2), spans=(span,)),),
        "dialogues": (Dialogue(messages=messages),),
        "end_reason": "end_call",
        "started_at": START - timedelta(seconds=5),
    }
    return Trajectory(**(fields | changes))


class Rig:
    """One judge with a manual clock. `restart` crashes it and starts a new one on the same database."""

    def __init__(self, service_bench: Bench, service: StreamService, settings: JudgeSettings) -> None:
        self.bench = service_bench
        self.service = service
        self._wanted = settings
        self._work: asyncio.Task[None] | None = None

    @property
    def rewards(self) -> list[Reward]:
        return self.bench.sent(Reward)

    def start(self) -> None:
        (work,) = self.service.workers(self.bench.processor)
        self._work = asyncio.ensure_future(work)

    async def stop(self) -> None:
        assert self._work is not None
        self._work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._work

    async def restart(self) -> None:
        await self.stop()
        self.service = app.service(self._wanted)
        self.bench.processor.handlers = self.service.handlers
        self.start()

    async def until(self, condition: Callable[[], object], description: str = "condition") -> None:
        """Wait in real time, while the judge's clock stands still. Raises the worker's exception."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self._work is not None
            if self._work.done():
                self._work.result()
            assert time.monotonic() < deadline, f"{description}: not after {WAIT_S} s; rewards: {self.rewards}"
            await asyncio.sleep(0.005)

    async def judged(self, count: int = 1) -> list[Reward]:
        """Return the published rewards once there are `count`."""
        await self.until(lambda: len(self.rewards) >= count, f"{count} rewards")
        return self.rewards

    async def idle(self) -> None:
        """Wait until no trajectory is being judged."""
        await asyncio.sleep(0.015)  # more than one look at the queue
        await self.until(lambda: REGISTRY.get_sample_value("headrace_judge_in_progress") == 0, "an idle worker")

    async def tick(self, seconds: float = 0.0) -> None:
        """Advance the clock and run the timers once."""
        self.bench.clock.advance(seconds)
        for timer in self.service.timers:
            await self.bench.step(timer.step)


@contextlib.asynccontextmanager
async def replica(of: Rig, settings: JudgeSettings, data_dir: Path, url: str) -> AsyncIterator[Rig]:
    """Run a second judge on the database of `of`, with its own clock and bus."""
    first = of.bench.processor.database
    name = first.schema or Path(first.engine.url.database or "").stem
    common = Common.model_validate({"data_dir": data_dir, "database": {"url": url}})
    database = Database.open(name, common)
    blobs = BlobStore.open(common)
    producer, clock = MemoryProducer(blobs), ManualClock()
    service = app.service(settings)
    processor = Processor(
        service="test",
        handlers=service.handlers,
        database=database,
        tables=service.tables,
        outbox=Outbox(database, service.tables, producer, clock),
        blobs=blobs,
        clock=clock,
    )
    rig = Rig(Bench(processor, producer, clock), service, settings)
    rig.start()
    try:
        yield rig
    finally:
        await rig.stop()
        await database.close()


@contextlib.asynccontextmanager
async def judge(settings: JudgeSettings, data_dir: Path, url: str = "sqlite") -> AsyncIterator[Rig]:
    """Run a judge with an empty database during the block."""
    service = app.service(settings)
    hosted = Service(service.tables, service.handlers, package=service.package, limits=service.limits)
    async with bench(hosted, url, data_dir) as service_bench:
        rig = Rig(service_bench, service, settings)
        rig.start()
        try:
            yield rig
        finally:
            await rig.stop()
