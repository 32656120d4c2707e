"""Tests with clients of other projects: kcat, Kafka's Java client, and Faust.

kcat is a common tool to inspect a bus (Debian has the old librdkafka 2.0.2). Agents on the JVM use the Java client,
which comes from the test node. Faust hosts the stream services: an agent, restarts at the committed offset, and a table
with its changelog.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import faust
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from tests.contract.bus.conftest import CreateTopic
from tests.support.servers import KAFKA_JARS, missing_kafka
from tests.support.wire_client import consuming, eventually, producing


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
