"""Tests of readers of the bus: the stream host, and the source of the trainer.

The host acknowledges records after their durable effect, and stores log ends and group positions. The trainer's source
rereads records, and detects a bus that was replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic, RecordsToDelete
from aiokafka.structs import TopicPartition
from sqlalchemy import MetaData

from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import Offsets
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings, Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.processor import Handling, Processor, ProcessorLimits, read_positions
from headrace_runtime.stream.stream_service import FaustHost
from headrace_schemas import Event, Feedback
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.ids import session_key
from headrace_trainer.source import BusReplaced, KafkaSource
from tests.support.wire_client import administering, eventually

metadata = MetaData()
tables = StreamTables(metadata)


@dataclass
class Stage:
    """Consumer group of one test on a shared topic. Only feedback with the key of this stage is counted."""

    common: Common
    database: Database
    producer: EventProducer
    blobs: BlobStore
    group: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex}")
    handled: list[str] = field(default_factory=list)
    fail_at: str | None = None

    @property
    def key(self) -> str:
        return session_key("default", self.group)

    async def handle(self, event: Feedback, _handling: Handling) -> Sequence[Event]:
        if event.session_key == self.key:
            if event.feedback_id == self.fail_at:
                raise Unavailable("something that this needs is away")
            self.handled.append(event.feedback_id)
        return []

    def host(self) -> FaustHost:
        clock = SystemClock()
        processor = Processor(
            service="test",
            handlers={"feedback": self.handle},
            database=self.database,
            tables=tables,
            outbox=Outbox(self.database, tables, self.producer, clock),
            blobs=self.blobs,
            clock=clock,
            limits=ProcessorLimits(retry_s=0.3),
        )
        folder = self.common.data_dir / "faust"
        return FaustHost(processor, ("feedback",), self.common.bus, group=self.group, folder=folder, batch_max=1)

    async def send(self, *names: str) -> None:
        for name in names:
            await self.producer.send(Feedback(time=utcnow(), feedback_id=name, session_key=self.key, value=1.0))

    async def current_offset(self) -> int:
        """Return the partition of this stage's key."""
        async with offsets(self) as positions:
            before = await positions.ends("feedback")
            await self.send("probe")
            after = await positions.ends("feedback")
        (partition,) = [number for number in after if after[number] != before[number]]
        return partition


@contextlib.asynccontextmanager
async def offsets(stage: Stage) -> AsyncIterator[Offsets]:
    created = Offsets(stage.common.bus, stage.group)
    await created.start()
    try:
        yield created
    finally:
        await created.stop()


@pytest.fixture
async def stage(bus: str, tmp_path: Path) -> AsyncIterator[Stage]:
    common = Common.model_validate({"data_dir": tmp_path, "bus": {"address": bus}})
    await topics.ensure(common.bus)
    database = Database.open("test", common)
    async with database.transaction() as tx:
        await tx.run_sync(metadata.create_all)
    blobs = BlobStore.open(common)
    producer = EventProducer(common.bus, "test", blobs)
    await producer.start()
    yield Stage(common, database, producer, blobs)
    await producer.stop()
    await database.close()


@contextlib.asynccontextmanager
async def running(host: FaustHost) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(host.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(stage: Stage, name: str) -> None:
    async with asyncio.timeout(60):
        while name not in stage.handled:  # noqa: ASYNC110 (the handler runs in another task)
            await asyncio.sleep(0.05)


async def test_only_what_was_handled_is_acknowledged(stage: Stage) -> None:
    partition = await stage.current_offset()
    await stage.send("a", "poisoned", "c")
    stage.fail_at = "poisoned"
    async with running(stage.host()) as task:
        await asyncio.wait([task], timeout=60)
        with pytest.raises(BaseExceptionGroup) as stopped:
            task.result()
        assert stopped.group_contains(Unavailable, match="something that this needs is away")
    assert stage.handled == ["probe", "a"], "nothing after what could not be handled"
    async with offsets(stage) as positions:
        committed = (await positions.starts(["feedback"]))["feedback", partition]
        assert committed <= (await positions.ends("feedback"))[partition] - 2
    stage.fail_at = None
    async with running(stage.host()) as task:
        await until(stage, "c")
    assert stage.handled == ["probe", "a", "poisoned", "c"], "each once, in order"


async def _reached(stage: Stage, ends: Mapping[int, int]) -> None:
    """Wait until the stored positions have reached `ends`. Each is stored after the group has assigned the
    partition."""

    async def reached() -> bool:
        async with stage.database.transaction() as tx:
            offset = await read_positions(tx, tables, "feedback")
        return all(offset.get(number, -1) >= end for number, end in ends.items())

    await eventually(reached, 30)


async def test_a_new_database_takes_its_positions_from_the_group(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    partition = await stage.current_offset()
    await stage.send("a")
    async with offsets(stage) as positions, running(stage.host()) as task:
        ends = await positions.ends("feedback")

        async def acknowledged() -> bool:
            return (await positions.starts(["feedback"]))["feedback", partition] == ends[partition]

        await eventually(acknowledged, 30)
        assert stage.handled == ["probe", "a"]
        assert not task.done()
    async with stage.database.transaction() as tx:
        await tx.execute(tables.positions.delete())
        await tx.execute(tables.seen.delete())
    async with running(stage.host()):
        await stage.send("b")
        await until(stage, "b")
        await _reached(stage, ends)  # also where nothing has come since
    assert stage.handled.count("a") == 1
    assert list(elsewhere.iterdir()) == [], "nothing is left where a service happens to be started"


async def test_a_topic_that_does_not_exist_has_no_end(stage: Stage) -> None:
    async with offsets(stage) as positions:
        with pytest.raises(Unavailable, match="does not exist yet"):
            await positions.ends("no-such-topic")


async def test_a_bus_that_is_away_is_unavailable(stage: Stage) -> None:
    nobody = stage.common.bus.model_copy(update={"address": "127.0.0.1:1"})
    with pytest.raises(Unavailable):
        await Offsets(nobody, "g").start()
    with pytest.raises(Unavailable):
        await Offsets(stage.common.bus, "g").ends("turns")


async def fill(bus: str) -> tuple[str, str]:
    """Create two topics: experiences with two partitions of five records, and decisions with one record."""
    suffix = uuid.uuid4().hex[:8]
    experiences, decisions = f"experiences-{suffix}", f"decisions-{suffix}"
    async with administering(bus) as admin:
        await admin.create_topics([NewTopic(experiences, 2, 1), NewTopic(decisions, 1, 1)])
    producer = AIOKafkaProducer(bootstrap_servers=bus)
    await producer.start()
    for number in range(10):
        await producer.send_and_wait(experiences, str(number).encode(), partition=number % 2)
    await producer.send_and_wait(decisions, b"d")
    await producer.stop()
    return experiences, decisions


@pytest.fixture
async def names(bus: str) -> tuple[str, str]:
    return await fill(bus)


async def collect(source: KafkaSource, count: int, limit: int = 100) -> list[Record]:
    records: list[Record] = []
    for _ in range(40):
        records += await source.poll(limit)
        if len(records) >= count:
            break
    return records


async def test_it_reads_from_the_offsets_it_is_given(bus: str, names: tuple[str, str]) -> None:
    source = KafkaSource(BusSettings(address=bus), *names)
    await source.start({names[0]: {0: 2, 1: 4}, names[1]: {0: 1}})
    records = await collect(source, 4)
    await source.stop()
    assert sorted((r.topic, r.partition, r.offset) for r in records) == [
        (names[0], 0, 2), (names[0], 0, 3), (names[0], 0, 4), (names[0], 1, 4),
    ]  # fmt: skip


async def test_experiences_can_be_held_back_and_decisions_cannot(bus: str, names: tuple[str, str]) -> None:
    source = KafkaSource(BusSettings(address=bus), *names)
    await source.start({})
    records = await collect(source, 1, limit=0)
    records += await source.poll(0)
    assert [record.value for record in records] == [b"d"]
    some = await source.poll(3)
    assert 0 < len(some) <= 3
    rest = await collect(source, 10 - len(some))
    await source.stop()
    assert sorted(int(record.value or b"") for record in [*some, *rest]) == list(range(10)), "each exactly once"


async def test_one_record_can_be_read_again(bus: str, names: tuple[str, str]) -> None:
    source = KafkaSource(BusSettings(address=bus), *names)
    await source.start({})
    record = (await source.fetch([(1, 2)]))[1, 2]
    await source.stop()
    assert (record.partition, record.offset, record.value) == (1, 2, b"5")


async def test_a_bus_that_ends_before_our_offsets_is_not_ours(bus: str, names: tuple[str, str]) -> None:
    source = KafkaSource(BusSettings(address=bus), *names)
    with pytest.raises(BusReplaced, match=r"ends at 5, but the lineage has read up to 6: bring the old bus back"):
        await source.start({names[0]: {0: 6}})
    assert not source.started


@pytest.mark.kafka
async def test_what_retention_took_is_counted_and_passed(kafka_bus: str) -> None:
    """The test needs Kafka, because the embedded broker has no request to delete records."""
    names = await fill(kafka_bus)
    async with administering(kafka_bus) as admin:
        await admin.delete_records({TopicPartition(names[0], 0): RecordsToDelete(before_offset=3)})
    source = KafkaSource(BusSettings(address=kafka_bus), *names)
    await source.start({names[0]: {0: 1, 1: 5}, names[1]: {0: 1}})
    records = await collect(source, 2)
    assert await source.fetch([(0, 1)]) == {}
    await source.stop()
    assert [(r.partition, r.offset) for r in records] == [(0, 3), (0, 4)]


async def test_a_topic_that_is_not_there_is_unavailable(bus: str) -> None:
    source = KafkaSource(BusSettings(address=bus), "nowhere-at-all", "nor-here")
    with pytest.raises(Unavailable, match="nowhere-at-all"):
        await source.start({})
