"""Tests of a trainer process on a real bus: after a kill, no experience is lost or trained twice (P4).

The trainer stores its own offsets, pauses when its queue is full, rereads records, and detects a bus that was replaced.
"""

from __future__ import annotations

import asyncio
import random
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic, RecordsToDelete
from aiokafka.structs import TopicPartition

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record, decode
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint, DeadLetter, Event, Experience, TrainingMetrics
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.source import BusReplaced, KafkaSource
from tests.integration.conftest import TrainerProcess
from tests.support.presence import draw_seed
from tests.support.wire_client import administering
from tests.unit.trainer.world import experience

COUNT = 160
BATCH = 8

E = TypeVar("E", bound=Event)


class Observer:
    """Reader of the events that one model's trainer publishes on the bus."""

    def __init__(self, bus: BusSettings, model: str, blobs: BlobStore) -> None:
        self._bus = bus
        self._model = model
        self._blobs = blobs
        self.checkpoints: dict[str, Checkpoint] = {}
        self.accounts: dict[str, TrainingMetrics] = {}
        self.letters: dict[str, DeadLetter] = {}
        self.changed = asyncio.Event()

    async def run(self, event: type[Event]) -> None:
        reader = consumer(self._bus, "test")
        await reader.start()
        try:
            await reader.seek_to_beginning(*await assign_all(reader, event.topic))
            async for message in reader:
                self._note((await decode(record_of(message), self._blobs)).event)
        finally:
            await reader.stop()

    def _note(self, event: Event) -> None:
        if isinstance(event, Checkpoint) and event.model == self._model:
            self._once(self.checkpoints, event)
        elif isinstance(event, TrainingMetrics) and event.model == self._model:
            self._once(self.accounts, event)
        elif isinstance(event, DeadLetter) and event.service == "trainer" and self._model.encode() in event.value:
            self._once(self.letters, event)
        self.changed.set()

    @staticmethod
    def _once(seen: dict[str, E], event: E) -> None:
        first = seen.setdefault(event.event_id, event)
        same = first.model_copy(update={"time": event.time}) == event
        assert same, f"{event.event_id} was said twice and differently"

    @property
    def fates(self) -> list[tuple[str, int]]:
        return [(v.experience_id, v.revision) for account in self.accounts.values() for v in account.verdicts]

    async def wait_for_versions(self, count: int, process: TrainerProcess) -> None:
        await self.wait(lambda: len(self.checkpoints) >= count, f"{count} versions", process)

    async def wait(self, condition: Callable[[], bool], label: str, process: TrainerProcess) -> None:
        try:
            async with asyncio.timeout(60):
                while not condition():
                    assert process.running(), process.log[-3000:]
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            pytest.fail(f"{label}: not after 60 s; {process.log[-3000:]}")


@pytest.mark.long
async def test_a_killed_trainer_goes_on_where_it_was(
    bus: str, base: Path, tmp_path: Path, processes: list[TrainerProcess]
) -> None:
    seed = draw_seed()
    draw = random.Random(seed)
    model = f"m-{uuid.uuid4().hex[:8]}"
    process = TrainerProcess(
        tmp_path, bus, base, MODEL=model, BATCH_EXPERIENCES=BATCH, BATCH_WAIT_S=0.5, BATCH_EXPERIENCES_MIN=1,
        MAX_STALENESS=10_000, SAVE_INTERVAL_S=0.5,
    )  # fmt: skip
    processes.append(process)
    settings = BusSettings(address=bus)
    await topics.ensure(settings)
    blobs = BlobStore((process.data_dir / "blobs").as_uri())
    observer = Observer(settings, model, blobs)
    watching = [asyncio.create_task(observer.run(event)) for event in (Checkpoint, TrainingMetrics, DeadLetter)]
    producer = EventProducer(settings, "test", blobs)
    await producer.start()
    try:
        process.begin()
        await observer.wait(lambda: len(observer.checkpoints) == 1, "the base version", process)
        (first,) = observer.checkpoints.values()
        expected = await feed(producer, model, first.version, draw)
        await observer.wait_for_versions(len(observer.checkpoints) + draw.randint(2, 12), process)
        process.kill()
        process.begin()
        await observer.wait(lambda: len(observer.fates) >= len(expected), "every verdict", process)
        await asyncio.to_thread(healthy, process)
        assert await asyncio.to_thread(process.stop) == 0
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await producer.stop()

    assert sorted(observer.fates) == sorted(expected), "one verdict each, and none missing"
    assert len(observer.letters) == 3, "one dead letter for each piece of poison"
    steps = sorted(checkpoint.step for checkpoint in observer.checkpoints.values())
    assert steps == list(range(len(steps)))
    check_state(blobs)


async def feed(producer: EventProducer, model: str, version: str, draw: random.Random) -> list[tuple[str, int]]:
    """Send experiences, redeliveries, revisions, withdrawals without tokens, and invalid records.

    Return the ids and revisions that need an outcome.
    """
    expected: list[tuple[str, int]] = []
    for number in range(COUNT):
        events: list[Experience] = [experience(number, version, draw.random(), model=model, task=f"t{number % 5}")]
        if draw.random() < 0.2:
            events.append(events[0])
        if draw.random() < 0.1:
            events.append(experience(number, version, draw.random(), revision=1, model=model, task=f"t{number % 5}"))
        if draw.random() < 0.1:
            events.append(experience(number, version, None, revision=2, model=model, branch=False))
        expected += {(event.experience_id, event.revision) for event in events}
        await producer.send_raw([await producer.encode(event) for event in events])
        if number % 60 == 20:
            await producer.send_raw([Outgoing("experiences", b"poison", f'{{"{model}": {number}}}'.encode(), ())])
    return expected


def healthy(process: TrainerProcess) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/health", timeout=10) as answer:
        assert b'"status":"ok"' in answer.read()
    with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/metrics", timeout=10) as answer:
        assert b"headrace_trainer_steps" in answer.read()


def check_state(blobs: BlobStore) -> None:
    """Check that each trained revision has contributed once to the remaining weights."""
    saved = LineageStore(blobs, "main").read()
    assert saved is not None
    for name, entry in saved.window.items():
        assert len(entry.contributions) <= len(entry.revisions), name
        assert len({contribution.step for contribution in entry.contributions}) == len(entry.contributions), name
    trained = sum(len(entry.contributions) for entry in saved.window.values())
    assert COUNT * 0.75 < trained <= saved.steps * (BATCH + 3)


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
