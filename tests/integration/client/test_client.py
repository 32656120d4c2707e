"""Tests of producers in other languages, of topic ranges, and of large events.

The examples of docs/producing.md run, and their events are scored like all others. Ranges of a topic are read by
offset, time and key on both buses, with invalid records and large values. Events beyond the topic's limit go through
the blob store.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import uuid
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import MessageSizeTooLargeError
from aiokafka.partitioner import murmur2

from headrace.errors import Unreachable, UsageError
from headrace.topics import Entry, Progress, Range, connected
from headrace_operations.from_topics import read_turn_account
from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.kafka import topics
from headrace_runtime.kafka import topics as catalogue
from headrace_runtime.kafka.consumer import record_of
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import EVENTS, DeadLetter, Event, Experience, Trajectory, Turn
from headrace_schemas.events.chat import Message
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX
from headrace_schemas.values.ids import session_key, uuid7
from tests.docs.fences import fences
from tests.integration.conftest import on_each_bus
from tests.integration.streams.conftest import StreamsRig, rig_on
from tests.support import packages, presence
from tests.support.service_process import ServiceProcess, read_topic
from tests.support.turns import READY, ask, feedback, report, turn, user, verdict
from tests.support.wire_client import eventually

ROOT = Path(__file__).resolve().parents[3]
PRODUCERS = ROOT / "examples" / "producers"
CONSUMERS = ROOT / "examples" / "reward_consumers"
COMMANDS = {
    "python": [sys.executable, str(PRODUCERS / "python" / "produce.py")],
    "node": ["node", str(packages.NODE_FOLDER / "node" / "produce.mjs")],
    "shell": [str(PRODUCERS / "shell" / "produce.sh")],
}
NEEDS = {"python": (), "node": ("kafkajs",), "shell": ("kcat", "jq")}


def test_the_documented_event_is_the_example_and_the_example_is_valid() -> None:
    text = (PRODUCERS / "trajectory.json").read_text(encoding="utf-8")
    event = Trajectory.from_json(text.encode())
    assert event.session_key == session_key("default", event.session_id)
    assert event.branches[0].loss_mask == (0, 0, 0, 0, 0, 1, 1, 1)
    json_fences = [fence for fence in fences(ROOT / "docs" / "producing.md") if fence.language == "json"]
    assert json.loads(text) in [json.loads(fence.text) for fence in json_fences]


def test_fifteen_lines_are_enough_with_the_sdk() -> None:
    lines = (CONSUMERS / "with_sdk.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line]) <= 15


@pytest.fixture
async def rig(own_bus: str, tmp_path: Path) -> AsyncIterator[StreamsRig]:
    """Yield a scorer that waits for both reward sources of the example, on a bus without models."""
    async with rig_on(own_bus, tmp_path) as streams:
        settings = {"SCORER__REQUIRED": ["short", "polite"]}
        streams.processes = {"scorer": [ServiceProcess("scorer", tmp_path, own_bus, **settings)]}
        with running("with_sdk.py", own_bus, tmp_path), running("without_sdk.py", own_bus, tmp_path):
            streams.every[0].start()
            yield streams


@contextmanager
def running(name: str, bus: str, folder: Path) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(CONSUMERS / name), bus], stdout=log, stderr=log)
    try:
        yield
    finally:
        still = process.poll() is None
        process.terminate()
        process.wait(20)
        assert still, (folder / f"{name}.log").read_text()


def session_for(language: str) -> str:
    """Return a session id that librdkafka's default partitioner would send to another partition than Kafka's."""
    while True:
        name = f"{language}-{uuid.uuid4().hex[:12]}"
        key = session_key("default", name).encode()
        if partition_of(key) != zlib.crc32(key) % 4:
            return name


def partition_of(key: bytes) -> int:
    return int((murmur2(key) & 0x7FFFFFFF) % 4)


async def produce(language: str, session: str, bus: str) -> str:
    for name in NEEDS[language]:
        presence.need(name)
    process = await asyncio.create_subprocess_exec(
        *COMMANDS[language], session, bus, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(60):
        printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    return printed.decode()


@on_each_bus("own_bus")
@pytest.mark.long
async def test_every_language_is_scored_by_both_consumers(rig: StreamsRig) -> None:
    sessions = {language: session_for(language) for language in COMMANDS}
    skipped = {}
    for language, session in list(sessions.items()):
        try:
            printed = await produce(language, session, rig.bus)
        except pytest.skip.Exception as reason:
            skipped[language] = str(reason)
            del sessions[language]
            continue
        assert session in printed
        match = re.search(r"trajectories\[(\d)\]@\d+", printed)
        if match:
            assert int(match[1]) == partition_of(session_key("default", session).encode())
    keys = {session_key("default", session) for session in sessions.values()}
    experiences: dict[str, Experience] = {}

    async def scored() -> bool:
        experiences.update(
            {
                experience.session_key: experience
                for experience in await rig.read(Experience)
                if experience.session_key in keys
            }
        )
        return experiences.keys() == keys

    await eventually(scored, 60)
    for experience in experiences.values():
        assert experience.reward == pytest.approx((0.9 + 0.0) / 2)
        assert {part.source: part.value for part in experience.parts} == {"short": pytest.approx(0.9), "polite": 0.0}
    assert [letter for letter in await rig.read(DeadLetter) if letter.key in keys] == []
    await partitions_hold(rig, keys)
    if skipped:
        pytest.skip(f"ran all but {skipped}")


async def partitions_hold(rig: StreamsRig, keys: set[str]) -> None:
    """Check that each event is on the partition that Kafka's own partitioner selects."""
    from headrace.topics import Range, connected

    async with connected(BusSettings(address=rig.bus).address) as topics:
        entries = [entry async for entry in topics.read(Range("trajectories", keys=keys))]
    assert {entry.key for entry in entries} == keys
    assert [entry.partition for entry in entries] == [partition_of(entry.key.encode()) for entry in entries]


TOPIC = "feedback"


async def entries(bus: str, requested_range: Range, progress: Progress | None = None) -> list[Entry]:
    async with connected(bus) as topics:
        return [entry async for entry in topics.read(requested_range, progress)]


@dataclass(frozen=True)
class Recorded:
    """Ten records with one new key: partition, first offset and time of the first record. Times increase by one
    second."""

    key: str
    partition: int
    first: int
    start_ms: int


@pytest.fixture
async def recorded(bus: str) -> Recorded:
    """Write feedback with the values 0 to 9, the fourth of them invalid, later than all records of other tests."""
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


async def test_the_account_of_a_bus(empty_bus: str, tmp_path: Path) -> None:
    settings = BusSettings(address=empty_bus)
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
    account = await read_turn_account(empty_bus, report=lambda read, total: reports.append((read, total)))
    assert account.problems == ()
    assert (account.captured, account.trained, account.waiting, account.dropped) == (4, 2, {"session": 2}, {})
    assert reports[-1] == (14, 14)
    assert len(list(blobs.digests())) == 1, "the large turn was a reference, and was followed"
    again = await asyncio.gather(*(read_turn_account(empty_bus) for _ in range(3)))
    assert set(map(str, again)) == {str(account)}, "reading changes nothing"


MEBIBYTE = 1_048_576


@on_each_bus("own_bus")
@pytest.mark.long
async def test_a_turn_of_three_mebibytes_becomes_an_experience(own_bus: str, tmp_path: Path) -> None:
    session = tmp_path.name
    turn = ask([user("x" * MEBIBYTE)] * 3, "right", session=session, prompt_token_ids=(1, 2, 3))
    value = turn.to_json()
    assert len(value) > 3 * topics.catalogue()["turns"].max_message_bytes
    async with rig_on(own_bus, tmp_path) as rig:
        await the_bus_itself_refuses(own_bus, turn)
        await rig.start()
        await rig.producer.send(turn)
        await rig.producer.send(feedback(session, value=1.0, ends_session=True))

        async def scored() -> bool:
            return any(experience.session_id == session for experience in await rig.read(Experience))

        await eventually(scored, 60)
        assert [event for event in await rig.read(Turn) if event.turn_id == turn.turn_id] == [turn]
        (trajectory,) = [event for event in await rig.read(Trajectory) if event.session_id == session]
        assert trajectory.messages[:3] == turn.messages
        assert [event for event in await rig.read(DeadLetter) if event.key == turn.key] == []
        poison = Record("turns", 0, 7, turn.key.encode(), b"{" * (MEBIBYTE - 1000))
        await rig.producer.send(dead_letter("test", poison, "invalid_json", "not json"))
        (letter,) = [event for event in await rig.read(DeadLetter) if event.key == turn.key]
        assert letter.value == poison.value, "a refused record of the largest size is kept whole"
    blobs = BlobStore(f"file://{tmp_path}/blobs")
    for topic in ("turns", "trajectories", "dead-letters"):
        (record,) = [event for event in await raw(own_bus, topic) if event.key == turn.key.encode()]
        assert len(record.value or b"") <= PAYLOAD_BYTES_MAX
        assert any(name == "ce_dataref" for name, _ in record.headers), topic
    assert len(list(blobs.digests())) == 3


async def the_bus_itself_refuses(bus: str, turn: Turn) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bus, max_request_size=8 * MEBIBYTE) as producer:
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send_and_wait("turns", turn.to_json(), turn.key.encode())


async def raw(bus: str, topic: str) -> list[Record]:
    return [record_of(message) for message in await read_topic(BusSettings(address=bus), topic)]
