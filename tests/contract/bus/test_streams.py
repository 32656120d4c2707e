"""Tests of Kafka Streams, of compacted topics as tables, and of transactions.

Kafka Streams keeps state with a repartition and a changelog topic, exactly once, through kill -9 of program and broker;
Apache Kafka is the reference, and only the program is killed there. In a table, the last value wins, and a null value
deletes. Transactions of aiokafka are atomic over partitions and offsets, fenced, and invisible until committed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
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
