"""Tests with clients of other projects: librdkafka through confluent-kafka, kcat, and Kafka's Java client.

librdkafka has a producer, a consumer group, administration and transactions. kcat is a common tool to inspect a bus
(Debian has the old librdkafka 2.0.2). Agents on the JVM use the Java client, which comes from the test node.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from tests.contract.bus.conftest import CreateTopic
from tests.support.servers import KAFKA_JARS, missing_kafka
from tests.support.wire_client import START_MS, eventually, everything

TIMEOUT_S = 60.0


@pytest.fixture
async def wide(create: CreateTopic) -> str:
    """Create a topic with four partitions, and return its name."""
    return await create(partitions=4)


@pytest.fixture
def reader(bus: str, unique: str) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": bus,
            "group.id": unique,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            "isolation.level": "read_committed",
            "debug": "cgrp,fetch",  # on stderr: pytest shows it when a test fails
        }
    )
    yield consumer
    consumer.close()


def _producer(bus: str, **options: object) -> Producer:
    settings = {"bootstrap.servers": bus, "enable.idempotence": True, "linger.ms": 5}
    return Producer({**settings, **{key.replace("_", "."): value for key, value in options.items()}})


def _take(consumer: Consumer, count: int) -> list[Message]:
    messages: list[Message] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count} records came"
        message = consumer.poll(0.2)
        if message is not None:
            assert message.error() is None, message.error()
            messages.append(message)
    return messages


def test_produce_and_consume(bus: str, topic: str, reader: Consumer) -> None:
    """Test every compression codec in turn, each with its own producer."""
    for turn, compression in enumerate(("none", "gzip", "snappy", "lz4", "zstd")):
        producer = _producer(bus, compression_type=compression)
        for number in range(200 * turn, 200 * turn + 200):
            value, timestamp = b"%d " % number + bytes(100), START_MS + number
            producer.produce(topic, value, b"k", headers={"n": b"%d" % number}, timestamp=timestamp)
        assert producer.flush(TIMEOUT_S) == 0
    reader.subscribe([topic])
    messages = _take(reader, 1000)
    assert [message.value() for message in messages] == [b"%d " % number + bytes(100) for number in range(1000)]
    assert messages[500].headers() == [("n", b"500")]
    assert messages[500].timestamp()[1] == START_MS + 500


def test_commits_positions_and_watermarks(bus: str, topic: str, reader: Consumer, unique: str) -> None:
    producer = _producer(bus)
    for number in range(10):
        producer.produce(topic, b"%d" % number, timestamp=START_MS + 1000 * number)
    assert producer.flush(TIMEOUT_S) == 0
    reader.subscribe([topic])
    third = _take(reader, 3)[2]
    reader.commit(message=third, asynchronous=False)
    (committed,) = reader.committed([TopicPartition(topic, 0)], TIMEOUT_S)
    assert committed.offset == 3
    assert reader.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S) == (0, 10)
    (located,) = reader.offsets_for_times([TopicPartition(topic, 0, START_MS + 4500)], TIMEOUT_S)
    assert located.offset == 5


def test_two_members(bus: str, wide: str, unique: str) -> None:
    options = {"bootstrap.servers": bus, "group.id": unique, "auto.offset.reset": "earliest"}
    first, second = Consumer(options), Consumer(options)
    try:
        first.subscribe([wide])
        second.subscribe([wide])
        deadline = time.monotonic() + TIMEOUT_S
        while not (len(first.assignment()) == len(second.assignment()) == 2):
            assert time.monotonic() < deadline
            first.poll(0.05)
            second.poll(0.05)
        assert {p.partition for p in first.assignment() + second.assignment()} == {0, 1, 2, 3}
    finally:
        first.close()
        second.close()


def test_unknown_topic(bus: str, unique: str) -> None:
    errors: list[KafkaError | None] = []
    options = {"topic_metadata_propagation_max_ms": 200, "topic_metadata_refresh_fast_interval_ms": 100}
    producer = _producer(bus, message_timeout_ms=3_000, **options)
    producer.produce(unique, b"x", on_delivery=lambda error, _: errors.append(error))
    producer.flush(TIMEOUT_S)
    assert [error.code() for error in errors if error] == [KafkaError.UNKNOWN_TOPIC_OR_PART]


def test_transaction(bus: str, topic: str, unique: str, reader: Consumer) -> None:
    producer = _producer(bus, transactional_id=unique)
    producer.init_transactions(TIMEOUT_S)
    for number, commit in enumerate([False, True]):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number)
        producer.commit_transaction(TIMEOUT_S) if commit else producer.abort_transaction(TIMEOUT_S)
    reader.subscribe([topic])
    assert [message.value() for message in _take(reader, 1)] == [b"1"]


def test_topics_as_admin(bus: str, unique: str) -> None:
    admin = AdminClient({"bootstrap.servers": bus})
    admin.create_topics([NewTopic(unique, 2, 1, config={"retention.ms": "60000"})])[unique].result(TIMEOUT_S)
    _until(lambda: unique in admin.list_topics(timeout=TIMEOUT_S).topics)
    assert len(admin.list_topics(timeout=TIMEOUT_S).topics[unique].partitions) == 2
    wrong = NewTopic(f"{unique}-x", 1, 1, config={"no.such": "1"})
    with pytest.raises(KafkaException) as caught:
        admin.create_topics([wrong])[wrong.topic].result(TIMEOUT_S)
    assert caught.value.args[0].code() == KafkaError.INVALID_CONFIG
    resource = ConfigResource(ResourceType.TOPIC, unique)
    config = admin.describe_configs([resource])[resource].result(TIMEOUT_S)
    assert config["retention.ms"].value == "60000"
    assert config["cleanup.policy"].value == "delete"
    admin.delete_topics([unique])[unique].result(TIMEOUT_S)
    _until(lambda: unique not in admin.list_topics(timeout=TIMEOUT_S).topics)


def test_groups_as_admin(bus: str, topic: str, unique: str, reader: Consumer) -> None:
    admin = AdminClient({"bootstrap.servers": bus})
    reader.subscribe([topic])
    _until(lambda: reader.poll(0.1) is None and len(reader.assignment()) == 1)
    group = admin.describe_consumer_groups([unique])[unique].result(TIMEOUT_S)
    assert (group.state, len(group.members)) == (ConsumerGroupState.STABLE, 1)
    assert unique in _groups(admin)
    assert _refused(admin, unique) == KafkaError.NON_EMPTY_GROUP
    reader.commit(offsets=[TopicPartition(topic, 0, 0)], asynchronous=False)
    reader.unsubscribe()
    _until(lambda: reader.poll(0.05) is None and _state(admin, unique) is ConsumerGroupState.EMPTY)
    admin.delete_consumer_groups([unique])[unique].result(TIMEOUT_S)
    assert unique not in _groups(admin)
    assert _refused(admin, unique) == KafkaError.GROUP_ID_NOT_FOUND


def _groups(admin: AdminClient) -> set[str]:
    return {entry.group_id for entry in admin.list_consumer_groups().result(TIMEOUT_S).valid}


def _refused(admin: AdminClient, group: str) -> int:
    """Delete the group, and return the error code."""
    with pytest.raises(KafkaException) as caught:
        admin.delete_consumer_groups([group])[group].result(TIMEOUT_S)
    code: int = caught.value.args[0].code()
    return code


def _state(admin: AdminClient, group: str) -> ConsumerGroupState:
    state: ConsumerGroupState = admin.describe_consumer_groups([group])[group].result(TIMEOUT_S).state
    return state


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_consumer_with_the_newer_group_protocol_fails_at_once(request: pytest.FixtureRequest, unique: str) -> None:
    """The embedded broker has only the classic group protocol. Kafka has both."""
    consumer = Consumer(
        {"bootstrap.servers": request.getfixturevalue("embedded_bus"), "group.id": unique, "group.protocol": "consumer"}
    )
    try:
        consumer.subscribe([unique])
        with pytest.raises(KafkaException) as caught:
            _poll_callbacks(consumer)
        assert caught.value.args[0].code() in (KafkaError.UNSUPPORTED_VERSION, KafkaError._FATAL)
    finally:
        consumer.close()


def _poll_callbacks(consumer: Consumer) -> None:
    """Poll until an error comes, and raise it."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None and message.error():
            raise KafkaException(message.error())


async def test_an_administrator_changes_a_topic(bus: str, create: CreateTopic) -> None:
    name = await create(retention_ms=1_000_000)
    client = AdminClient({"bootstrap.servers": bus})
    change = ConfigResource(
        ResourceType.TOPIC,
        name,
        incremental_configs=[
            ConfigEntry("retention.ms", "2000000", incremental_operation=AlterConfigOpType.SET),
            ConfigEntry("segment.bytes", "3000000", incremental_operation=AlterConfigOpType.SET),
            ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.APPEND),
        ],
    )
    for future in client.incremental_alter_configs([change]).values():
        future.result(TIMEOUT_S)
    resource = ConfigResource(ResourceType.TOPIC, name)

    async def changed() -> bool:
        (configs,) = (future.result(TIMEOUT_S) for future in client.describe_configs([resource]).values())
        return (configs["retention.ms"].value, configs["segment.bytes"].value) == ("2000000", "3000000") and set(
            configs["cleanup.policy"].value.split(",")
        ) == {"compact", "delete"}

    await eventually(changed)
    client.create_partitions([NewPartitions(name, 3)])[name].result(TIMEOUT_S)

    async def grown() -> bool:
        return len(client.list_topics(name, timeout=TIMEOUT_S).topics[name].partitions) == 3

    await eventually(grown)
    with pytest.raises(KafkaException):
        client.create_partitions([NewPartitions(name, 2)])[name].result(TIMEOUT_S)


async def test_records_before_an_offset_are_deleted(bus: str, create: CreateTopic) -> None:
    name = await create()
    producer = Producer({"bootstrap.servers": bus})
    for number in range(10):
        producer.produce(name, b"%d" % number)
    producer.flush(TIMEOUT_S)
    client = AdminClient({"bootstrap.servers": bus})
    (future,) = client.delete_records([TopicPartition(name, 0, 4)]).values()
    assert future.result(TIMEOUT_S).low_watermark == 4
    assert [record.value for record in await everything(bus, name)] == [b"%d" % number for number in range(4, 10)]
    (future,) = client.delete_records([TopicPartition(name, 0, 11)]).values()
    with pytest.raises(KafkaException):
        future.result(TIMEOUT_S)


async def _kcat(*arguments: str, stdin: bytes = b"") -> str:
    process = await asyncio.create_subprocess_exec(
        "kcat",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate(stdin)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
async def test_produce_and_read_back(bus: str, topic: str) -> None:
    await _kcat("-b", bus, "-P", "-t", topic, "-K", ":", "-H", "ce_id=1", "-z", "gzip", stdin=b"a:1\nb:2\na:3\n")
    out = await _kcat("-b", bus, "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-f", "%o %k %s %h\n")
    assert out.splitlines() == ["0 a 1 ce_id=1", "1 b 2 ce_id=1", "2 a 3 ce_id=1"]


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
async def test_from_an_offset_and_from_a_time(bus: str, topic: str) -> None:
    await _kcat("-b", bus, "-P", "-t", topic, stdin=b"one\ntwo\nthree\n")
    assert (await _kcat("-b", bus, "-C", "-t", topic, "-o", "1", "-e", "-q")).split() == ["two", "three"]
    assert (await _kcat("-b", bus, "-C", "-t", topic, "-o", "-1", "-e", "-q")).split() == ["three"]
    assert (await _kcat("-b", bus, "-C", "-t", topic, "-o", "s@1000", "-e", "-q")).split() == ["one", "two", "three"]
    assert await _kcat("-b", bus, "-Q", "-t", f"{topic}:0:1000") == f"{topic} [0] offset 0\n"


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
async def test_list(bus: str, create: CreateTopic) -> None:
    topic = await create(partitions=3)
    listed = json.loads(await _kcat("-b", bus, "-L", "-J", "-t", topic))
    assert [len(entry["partitions"]) for entry in listed["topics"]] == [3]
    assert [broker["name"] for broker in listed["brokers"]] == [bus]


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
async def test_group(bus: str, topic: str, unique: str) -> None:
    await _kcat("-b", bus, "-P", "-t", topic, stdin=b"one\ntwo\n")
    options = ("-b", bus, "-G", unique, "-q", "-X", "auto.offset.reset=earliest", "-c")
    assert (await _kcat(*options, "1", topic)).split() == ["one"]
    assert (await _kcat(*options, "1", topic)).split() == ["two"]


PROGRAM = Path(__file__).with_name("JavaClient.java")


async def test_topics_producers_transactions_groups(bus: str, unique: str) -> None:
    reason = missing_kafka()
    if reason:
        pytest.skip(f"Kafka's jars: {reason}")
    process = await asyncio.create_subprocess_exec(
        "java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
        "-cp", f"{KAFKA_JARS}/*", str(PROGRAM), bus, unique,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert out.decode().endswith("ok\n"), out.decode()[-3_000:]
