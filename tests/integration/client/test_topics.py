"""Ranges of a topic on both buses: offsets, times, keys, poison, large values; and the account of a small history."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from headrace.errors import Unreachable, UsageError
from headrace.topics import Entry, Progress, Range, connected
from headrace_operations.from_topics import read_turn_account
from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.kafka import topics as catalogue
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import EVENTS, Event
from headrace_schemas.events.chat import Message
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.ids import session_key, uuid7
from tests.support.account_events import READY, report, turn, verdict
from tests.support.broker_process import BrokerProcess

TOPIC = "feedback"


async def entries(bus: str, requested_range: Range, progress: Progress | None = None) -> list[Entry]:
    async with connected(bus) as topics:
        return [entry async for entry in topics.read(requested_range, progress)]


@dataclass(frozen=True)
class Recorded:
    """Ten records of one fresh key: where the first one is, and when; each next one is a second later."""

    key: str
    partition: int
    first: int
    start_ms: int


@pytest.fixture
async def recorded(bus: str) -> Recorded:
    """Values 0 to 9 as feedback, the fourth one poison. Later than everything that other tests have sent."""
    await catalogue.ensure(BusSettings(address=bus))
    key = session_key("default", uuid7().hex)
    start_ms = epoch_ms(utcnow()) + 600_000
    producer = AIOKafkaProducer(bootstrap_servers=bus)
    await producer.start()
    positions = []
    for number in range(10):
        body = {"time": utcnow(), "feedback_id": f"{key}-{number}", "session_key": key, "value": number}
        value = EVENTS[TOPIC].model_validate(body).to_json() if number != 4 else b"{poison"
        sent = producer.send_and_wait(TOPIC, value, key.encode(), timestamp_ms=start_ms + number * 1000)
        positions.append(await sent)
    await producer.stop()
    return Recorded(key, positions[0].partition, positions[0].offset, start_ms)


async def test_a_key_between_offsets_and_times(bus: str, recorded: Recorded) -> None:
    first, keys = recorded.first, {recorded.key}

    def second(number: float) -> datetime:
        return from_epoch_ms(recorded.start_ms + round(number * 1000))

    progress = Progress()
    matches = await entries(bus, Range(TOPIC, keys=keys), progress)
    assert [entry.offset for entry in matches] == list(range(first, first + 10))
    assert progress.passed == progress.total >= 10
    assert [entry.event is None for entry in matches] == [number == 4 for number in range(10)]
    assert "Invalid JSON" in (matches[4].problem or "")
    assert matches[7].time == second(7)

    inner = Range(TOPIC, partitions=[recorded.partition], from_offset=first + 2, to_offset=first + 6)
    assert [entry.offset - first for entry in await entries(bus, inner)] == [2, 3, 4, 5]
    later = Range(TOPIC, keys=keys, since=second(3.5), until=second(7))
    assert [entry.offset - first for entry in await entries(bus, later)] == [4, 5, 6]
    assert await entries(bus, Range(TOPIC, keys=keys, since=second(100))) == []


async def test_what_does_not_exist_is_named(bus: str) -> None:
    with pytest.raises(UsageError, match="topic 'tunrs': does not exist"):
        await entries(bus, Range("tunrs"))
    await catalogue.ensure(BusSettings(address=bus))
    with pytest.raises(UsageError, match="there is no number 99"):
        await entries(bus, Range(TOPIC, partitions=[99]))


async def test_no_bus_is_said_so() -> None:
    with pytest.raises(Unreachable, match=r"bus 127\.0\.0\.1:1: "):
        await entries("127.0.0.1:1", Range(TOPIC))


@pytest.fixture
def own_bus(tmp_path: Path) -> Iterator[str]:
    """A broker of this test alone: the account is about everything on the bus."""
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    yield broker.address
    broker.stop()


async def test_the_account_of_a_bus(own_bus: str, tmp_path: Path) -> None:
    settings = BusSettings(address=own_bus)
    await catalogue.ensure(settings)
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    producer = EventProducer(settings, "test", blobs)
    await producer.start()
    large = turn("large", messages=(Message(role="user", content="x" * 300_000),))
    events: list[Event] = [*READY, report(verdict("E", "a", "b")), turn("c"), large]
    for event in [*events, *events]:  # sent twice, as after a crash
        await producer.send(event)
    await producer.stop()
    reports: list[tuple[int, int]] = []
    account = await read_turn_account(own_bus, report=lambda read, total: reports.append((read, total)))
    assert account.problems == ()
    assert (account.captured, account.trained, account.waiting, account.dropped) == (4, 2, {"session": 2}, {})
    assert reports[-1] == (14, 14)
    assert len(list(blobs.digests())) == 1, "the large turn was a reference, and was followed"
    again = await asyncio.gather(*(read_turn_account(own_bus) for _ in range(3)))
    assert set(map(str, again)) == {str(account)}, "reading changes nothing"
