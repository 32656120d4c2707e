"""Kafka Streams on the bus: state, a repartition and a changelog topic, exactly once, through kill -9 of both sides.

Apache Kafka itself is the reference for the program: it plays the same with the program killed, and is not killed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import TopicPartition

from tests.contract.bus.clients import administering, consuming, create, eventually, producing
from tests.support import kafka_node
from tests.support.broker_process import BrokerProcess
from tests.support.seeds import draw_seed

PROGRAM = Path(__file__).with_name("WordCount.java")
WORDS = [f"word-{number}" for number in range(40)]
LINES_EACH = 150
ENDS_WITHIN_S = 150.0


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def killable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess | kafka_node.KafkaNode]:
    """A bus of its own, since it is killed."""
    reason = kafka_node.missing()
    if reason:
        pytest.skip(f"Kafka's jars: {reason}")
    folder = tmp_path / "bus"
    bus = BrokerProcess(folder) if request.param == "embedded" else kafka_node.KafkaNode(folder, brief=True)
    bus.start()
    yield bus
    bus.stop()


class Streams:
    """The word count as a process."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._arguments = [address, "word-count", "lines", "counts", str(folder / "state")]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self._folder / "streams.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                "java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                "-cp", f"{kafka_node.JARS}/*", str(PROGRAM), *self._arguments,
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
async def test_counts_are_exact_through_kills(killable: BrokerProcess | kafka_node.KafkaNode, tmp_path: Path) -> None:
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
    """The last count of each word, as committed. A word's counts never go down: that would be work done twice."""
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
