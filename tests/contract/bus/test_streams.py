"""Tests of Kafka Streams and Faust, of compacted topics as tables, and of transactions.

Faust hosts the stream services: an agent, restarts at the committed offset, and a table with its changelog.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faust
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, ProducerFenced

from tests.contract.bus.conftest import CreateTopic
from tests.support.presence import draw_seed
from tests.support.servers import KAFKA_JARS, BrokerProcess, KafkaNode, missing_kafka
from tests.support.wire_client import administering, consuming, create, eventually, everything, producing, take

PROGRAM = Path(__file__).with_name("WordCount.java")
WORDS = [f"word-{number}" for number in range(40)]
LINES_EACH = 150
ENDS_WITHIN_S = 150.0


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def killable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess | KafkaNode]:
    """Yield a bus for this test alone, because the test kills it."""
    reason = missing_kafka()
    if reason:
        pytest.skip(f"Kafka's jars: {reason}")
    folder = tmp_path / "bus"
    bus = BrokerProcess(folder) if request.param == "embedded" else KafkaNode(folder, brief=True)
    bus.start()
    yield bus
    bus.stop()


class Streams:
    """Process of the Kafka Streams word count."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._arguments = [address, "word-count", "lines", "counts", str(folder / "state")]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self._folder / "streams.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                "java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                "-cp", f"{KAFKA_JARS}/*", str(PROGRAM), *self._arguments,
                stdout=log, stderr=log,
            )  # fmt: skip

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    def log(self) -> str:
        return (self._folder / "streams.log").read_text()[-3_000:]


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_counts_are_exact_through_kills(killable: BrokerProcess | KafkaNode, tmp_path: Path) -> None:
    seed = draw_seed()
    rng = random.Random(seed)
    await _create(killable.address)
    streams, expected = Streams(tmp_path, killable.address), Counter[str]()
    await streams.start()
    try:
        await _produce(killable.address, rng, expected)
        await _wait_for_counts(killable.address, streams)
        await _produce(killable.address, rng, expected)
        await streams.kill()
        await streams.start()
        await _produce(killable.address, rng, expected)
        if isinstance(killable, BrokerProcess):
            killable.kill()
            killable.start()
        await _produce(killable.address, rng, expected)

        async def exact() -> bool:
            return await _counts(killable.address) == expected

        try:
            await eventually(exact, ENDS_WITHIN_S)
        except TimeoutError:
            counts = await _counts(killable.address)
            pytest.fail(f"expected {expected}, found {counts}\n{streams.log()}")
    finally:
        await streams.kill()


async def _create(address: str) -> None:
    async with administering(address) as admin:
        await create(admin, "lines", 2)
        await create(admin, "counts", 1)


async def _produce(address: str, rng: random.Random, expected: Counter[str]) -> None:
    async with producing(address) as producer:
        for _ in range(LINES_EACH):
            words = rng.choices(WORDS, k=rng.randrange(1, 6))
            expected.update(words)
            await producer.send("lines", " ".join(words).encode())


async def _wait_for_counts(address: str, streams: Streams) -> None:
    """Wait until the application has committed its first counts."""

    async def counted() -> bool:
        return bool(await _counts(address))

    try:
        await eventually(counted, ENDS_WITHIN_S)
    except TimeoutError:
        pytest.fail(f"no counts came\n{streams.log()}")


async def _counts(address: str) -> Counter[str]:
    """Return the last committed count of each word. A count that falls would be work done twice."""
    counts: Counter[str] = Counter()
    async with consuming(address, isolation_level="read_committed") as consumer:
        partition = TopicPartition("counts", 0)
        consumer.assign([partition])
        end = (await consumer.end_offsets([partition]))[partition]
        await consumer.seek_to_beginning(partition)
        async with asyncio.timeout(60):
            while await consumer.position(partition) < end:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    for record in records:
                        word, count = record.key.decode(), int(record.value)
                        assert count > counts[word], f"{word}: {count} after {counts[word]}"
                        counts[word] = count
    return counts


async def test_last_value_wins_and_a_tombstone_removes(bus: str, create: CreateTopic) -> None:
    topic = await create(cleanup_policy="compact")
    writes = [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None), (b"c", b"1")]
    async with producing(bus) as producer:
        for key, value in writes:
            await producer.send_and_wait(topic, value, key)
    table: dict[bytes, bytes] = {}
    for record in await everything(bus, topic):
        if record.value is None:
            table.pop(record.key, None)
        else:
            table[record.key] = record.value
    assert table == {b"a": b"2", b"c": b"1"}


@pytest.mark.parametrize("compression", [None, "gzip"])
async def test_records_without_key_are_refused(bus: str, create: CreateTopic, compression: str | None) -> None:
    topic = await create(cleanup_policy="compact")
    async with producing(bus, compression_type=compression) as producer:
        with pytest.raises(KafkaError):  # 87, which aiokafka does not know by name; see test_wire
            await producer.send_and_wait(topic, b"no key")
    assert await everything(bus, topic) == []


COMMITTED = {"isolation_level": "read_committed"}


async def test_committed_and_aborted(bus: str, topic: str, unique: str) -> None:
    async with producing(bus, transactional_id=unique) as producer:
        for number, commit in enumerate([True, False, True, False, False, True]):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"%d" % number)
            await (producer.commit_transaction() if commit else producer.abort_transaction())
    assert [record.value for record in await everything(bus, topic, **COMMITTED)] == [b"0", b"2", b"5"]
    assert len(await everything(bus, topic)) == 6


async def test_open_transactions_hold_back_read_committed_alone(bus: str, topic: str, unique: str) -> None:
    partition = TopicPartition(topic, 0)
    async with producing(bus, transactional_id=unique) as producer, producing(bus) as plain:
        await plain.send_and_wait(topic, b"before")
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"inside")
        await plain.send_and_wait(topic, b"behind")
        async with consuming(bus, **COMMITTED) as careful, consuming(bus) as eager:
            careful.assign([partition])
            eager.assign([partition])
            assert (await careful.end_offsets([partition]))[partition] == 1
            assert (await eager.end_offsets([partition]))[partition] == 3
            assert [record.value for record in await take(eager, 3)] == [b"before", b"inside", b"behind"]
            assert [record.value for record in await take(careful, 1)] == [b"before"]
            waiting = asyncio.create_task(take(careful, 2))
            await producer.commit_transaction()
            assert [record.value for record in await waiting] == [b"inside", b"behind"]


async def test_several_partitions_and_offsets_in_one(bus: str, create: CreateTopic, unique: str) -> None:
    source, target = await create(), await create(partitions=3)
    group, partition = f"{unique}-group", TopicPartition(source, 0)
    async with consuming(bus, group_id=group) as consumer, producing(bus, transactional_id=unique) as producer:
        consumer.assign([partition])
        for commit in (False, True):
            await producer.begin_transaction()
            for number in range(3):
                await producer.send(target, b"%d" % commit, partition=number)
            await producer.send_offsets_to_transaction({partition: 7}, group)
            assert await consumer.committed(partition) is None
            await (producer.commit_transaction() if commit else producer.abort_transaction())

        async def moved() -> bool:
            offset: int | None = await consumer.committed(partition)
            return offset == 7

        await eventually(moved)  # Kafka answers EndTxn a little before the group has them
    async with consuming(bus, **COMMITTED) as reader:
        reader.assign([TopicPartition(target, number) for number in range(3)])
        records = await take(reader, 3)
    assert sorted((record.partition, record.value) for record in records) == [(0, b"1"), (1, b"1"), (2, b"1")]


async def test_the_successor_aborts_and_fences(bus: str, topic: str, unique: str) -> None:
    async with producing(bus, transactional_id=unique) as old:
        await old.begin_transaction()
        await old.send_and_wait(topic, b"of the old one")
        async with producing(bus, transactional_id=unique) as new:
            with pytest.raises(ProducerFenced):
                await old.send_and_wait(topic, b"too late")
            await new.begin_transaction()
            await new.send_and_wait(topic, b"of the new one")
            await new.commit_transaction()
            assert [record.value for record in await everything(bus, topic, **COMMITTED)] == [b"of the new one"]


async def test_a_forgotten_transaction_times_out(bus: str, topic: str, unique: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bus, transactional_id=unique, transaction_timeout_ms=1_000)
    await producer.start()
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"forgotten")
    partition = TopicPartition(topic, 0)
    async with consuming(bus, **COMMITTED) as consumer:
        assert (await consumer.end_offsets([partition]))[partition] == 0

        async def decided() -> bool:
            end: int = (await consumer.end_offsets([partition]))[partition]
            return end > 0

        await eventually(decided)  # Kafka looks every 10 s
    assert await everything(bus, topic, **COMMITTED) == []
    await producer._sender.close()
    await producer.client.close()
    producer._closed = True


def _app(bus: str, name: str, folder: Path) -> Any:
    return faust.App(
        name,
        broker=f"kafka://{bus}",
        store="memory://",
        datadir=folder,  # it makes one where it is started otherwise
        web_enabled=False,
        autodiscover=False,
        topic_disable_leader=True,
        topic_replication_factor=1,
        topic_partitions=2,
        consumer_auto_offset_reset="earliest",
        broker_session_timeout=10.0,
        broker_heartbeat_interval=1.0,
        broker_commit_interval=0.2,
        stream_wait_empty=False,
        loghandlers=[],
        logging_config={"version": 1, "disable_existing_loggers": False, "incremental": True},
    )


@contextlib.asynccontextmanager
async def _running(app: Any) -> AsyncIterator[None]:
    await app.start()
    try:
        yield
    finally:
        await app.stop()


def _collect(app: Any, source: Any, seen: list[bytes]) -> None:
    async def agent(stream: Any) -> None:
        async for event in stream.events():
            seen.append(event.value)  # noqa: PERF401 (one by one is the point)

    app.agent(source, name=f"{app.conf.id}-agent")(agent)


def _raw(app: Any, topic: str) -> Any:
    return app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")


async def test_an_agent_reads_everything_once_over_a_restart(
    bus: str, create: CreateTopic, unique: str, tmp_path: Path
) -> None:
    topic = await create(partitions=2)
    seen: list[bytes] = []
    async with producing(bus) as producer:
        for first in (0, 50):
            app = _app(bus, unique, tmp_path)
            _collect(app, _raw(app, topic), seen)
            for number in range(first, first + 50):
                await producer.send(topic, b"%d" % number, b"%d" % (number % 7))
            await producer.flush()
            async with _running(app):
                await eventually(partial(_has, seen, first + 50))
    assert sorted(map(int, seen)) == list(range(100))


async def test_a_table_with_its_changelog(
    bus: str, create: CreateTopic, unique: str, admin: AIOKafkaAdminClient, tmp_path: Path
) -> None:
    topic = await create(partitions=2)
    app = _app(bus, unique, tmp_path)
    table = app.Table("counts", default=int, partitions=2)
    handled: list[bytes] = []

    async def count(stream: Any) -> None:
        async for event in stream.events():
            table[event.key.decode()] += 1
            handled.append(event.value)

    app.agent(_raw(app, topic), name=f"{unique}-agent")(count)
    async with producing(bus) as producer:
        for number in range(20):
            await producer.send_and_wait(topic, b"x", b"%d" % (number % 4))
    async with _running(app):
        await eventually(lambda: _has(handled, 20))
        assert {key: table[key] for key in ("0", "1", "2", "3")} == dict.fromkeys(("0", "1", "2", "3"), 5)
    changelog = f"{unique}-counts-changelog"
    assert changelog in await admin.list_topics()
    async with consuming(bus) as consumer:
        partitions = [TopicPartition(changelog, 0), TopicPartition(changelog, 1)]
        consumer.assign(partitions)
        assert sum((await consumer.end_offsets(partitions)).values()) >= 4


async def _has(values: list[bytes], count: int) -> bool:
    await asyncio.sleep(0)
    return len(values) >= count
