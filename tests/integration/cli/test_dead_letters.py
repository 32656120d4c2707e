"""Tests of dead letters on both buses: a retry repeats the refused record once, and every decision is stored."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_runtime.kafka import topics as catalogue
from headrace_runtime.kafka.consumer import consumer, record_of
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import DeadLetter, Trajectory
from headrace_schemas.events.dead_letter import RETRY_HEADER
from headrace_schemas.events.envelope import SEQUENCE_HEADER
from tests.integration.streams.conftest import StreamsRig
from tests.support.service_process import ServiceProcess
from tests.support.turns import ask, end, feedback, user
from tests.support.wire_client import eventually


async def headrace(*arguments: str, status: int = 0) -> str:
    """Run `headrace` with `arguments`, check its exit status, and return its output."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env={"COLUMNS": "250"})
    assert result.exit_code == status, (result.output, result.exception)
    return str(result.output)


@dataclass
class Desk:
    """A bus with dead letters of one service, whose name is unique to this test."""

    bus: str
    service: str
    producer: EventProducer

    async def refuse(self, record: Record, reason: str = "handler_error") -> DeadLetter:
        letter = dead_letter(self.service, record, reason, "it \x1b[31mfailed")
        await self.producer.send(letter)
        return letter

    async def ask(self, *arguments: str, status: int = 0) -> str:
        return await headrace("dead-letters", *arguments, "--bus", self.bus, status=status)

    async def states(self) -> dict[str, str]:
        text = await self.ask("list", "--service", self.service, "--state", "all", "--json")
        return {letter["id"]: letter["state"] for letter in json.loads(text)["letters"]}

    async def last(self, topic: str, partition: int) -> list[ConsumerRecord]:
        """Return all records of a partition."""
        reader, topic_partition = consumer(BusSettings(address=self.bus), "test"), TopicPartition(topic, partition)
        await reader.start()
        records: list[ConsumerRecord] = []
        try:
            reader.assign([topic_partition])
            await reader.seek_to_beginning(topic_partition)
            stop = (await reader.end_offsets([topic_partition]))[topic_partition]
            while await reader.position(topic_partition) < stop:
                for messages in (await reader.getmany(timeout_ms=200)).values():
                    records += messages
        finally:
            await reader.stop()
        return records


@pytest.fixture
async def desk(bus: str, tmp_path: Path) -> AsyncIterator[Desk]:
    settings = BusSettings(address=bus)
    await catalogue.ensure(settings)
    producer = EventProducer(settings, "test", BlobStore((tmp_path / "blobs").as_uri()))
    await producer.start()
    yield Desk(bus, f"test-{uuid.uuid4().hex[:8]}", producer)
    await producer.stop()


async def refused_feedback(desk: Desk, partition: int = 2) -> tuple[Record, DeadLetter]:
    """Send valid feedback to a partition that its key would not choose. Return the record and its dead letter."""
    event = feedback(uuid.uuid4().hex)
    headers = (("ce_id", event.event_id.encode()), ("x-mine", "ü".encode()))
    await desk.producer.send_raw([Outgoing("feedback", event.key.encode(), event.to_json(), headers, partition)])
    record = record_of((await desk.last("feedback", partition))[-1])
    return record, await desk.refuse(record)


async def test_retry_puts_back_exactly_what_was_refused_and_only_once(desk: Desk) -> None:
    record, letter = await refused_feedback(desk)
    before = len(await desk.last("feedback", 2))
    await desk.ask("retry", letter.event_id, "--dry-run")
    assert await desk.states() == {letter.event_id: "open"}
    assert len(await desk.last("feedback", 2)) == before

    assert "1 dead letters put back" in await desk.ask("retry", letter.event_id[:12])
    log = await desk.last("feedback", 2)
    assert len(log) == before + 1
    assert (log[-1].key, log[-1].value) == (record.key, record.value)
    assert tuple(log[-1].headers) == (
        *record.headers,
        (RETRY_HEADER, letter.event_id.encode()),
        (SEQUENCE_HEADER, str(record.offset).encode()),
    ), "it keeps its place"
    assert await desk.states() == {letter.event_id: "retried"}

    assert "no open dead letter has an id that begins with" in (await desk.ask("retry", letter.event_id, status=2))
    assert "0 dead letters put back" in await desk.ask("retry", "--service", desk.service)
    assert len(await desk.last("feedback", 2)) == before + 1

    again = await desk.refuse(record_of(log[-1]))
    description = json.loads(await desk.ask("show", again.event_id, "--json"))
    assert (description["state"], description["retry_of"], description["value"]) == (
        "open",
        letter.event_id,
        json.loads(letter.value),
    )
    await desk.ask("retry", again.event_id)
    await desk.ask("retry", again.event_id, "--again")
    log = await desk.last("feedback", 2)
    assert len(log) == before + 3
    assert [value for name, value in log[-1].headers if name == RETRY_HEADER] == [again.event_id.encode()]
    description = json.loads(await desk.ask("show", again.event_id, "--json"))
    assert [(decision["number"], decision["action"]) for decision in description["decisions"]] == [
        (1, "retried"),
        (2, "retried"),
    ]


async def test_what_cannot_be_put_back_is_held_back_and_said(desk: Desk) -> None:
    table = await desk.refuse(Record("routing", 0, 5, b"m", b"{}"))
    poison = await desk.refuse(Record("turns", 1, 7, b"k", b"{no json"), "invalid_json")
    binary = await desk.refuse(Record("turns", 1, 8, b"\xff\xfe", b"{}"))
    printed = await desk.ask("retry", "--service", desk.service, status=1)
    assert "0 dead letters put back" in printed
    for words in ("routing is a table", "would be refused again: headrace.turn.v1", "its key is not text"):
        assert words in printed
    ends = len(await desk.last("turns", 1))
    await desk.ask("retry", "--service", desk.service, "--force", status=1)
    assert [record.value for record in await desk.last("turns", 1)][ends:] == [poison.value]
    assert await desk.states() == {table.event_id: "open", binary.event_id: "open", poison.event_id: "retried"}
    unretriable = await desk.refuse(Record("deleted", 0, 5, b"k", b"{}"), "unknown_topic")
    assert "its topic 'deleted' does not exist" in await desk.ask("retry", unretriable.event_id, "--force", status=2)


async def test_discarding_needs_a_reason_and_keeps_it(desk: Desk) -> None:
    letters = [await desk.refuse(Record("turns", 0, number, b"k", b"x"), "invalid_json") for number in range(4)]
    choice = ("--service", desk.service, "--topic", "turns", "--partition", "0")
    await desk.ask("discard", *choice, "--because", " ", status=2)
    await desk.ask("discard", "--because", "nothing was chosen", status=2)
    dry = json.loads(await desk.ask("discard", *choice, "--because", "load test", "--dry-run", "--json"))
    assert set(dry["ids"]) == {letter.event_id for letter in letters}
    await desk.ask("discard", *choice, "--from-offset", "1", "--to-offset", "3", "--because", "load test")
    states = await desk.states()
    assert [states[letter.event_id] for letter in letters] == ["open", "discarded", "discarded", "open"]
    assert "load test" in await desk.ask("show", letters[1].event_id)
    listed = json.loads(await desk.ask("list", "--service", desk.service, "--state", "all", "--limit", "1", "--json"))
    assert len(listed["letters"]) == 1
    (row,) = listed["counts"]
    assert (row["total"], row["open"], row["retried"], row["discarded"]) == (4, 2, 0, 2)


async def test_people_see_what_was_said_and_terminals_obey_none_of_it(desk: Desk) -> None:
    letter = await desk.refuse(Record("turns", 3, 9, b"k", b'{"a": "\x1b]0;x\x07"}', (("ce_id", b"one"),)))
    printed = await desk.ask("show", letter.event_id) + await desk.ask("list", "--service", desk.service)
    assert "\x1b]" not in printed and "\x1b[31m" not in printed  # noqa: PT018
    for words in ("turns[3]@9", "header ce_id", "handler_error", r"it \x1b[31mfailed"):
        assert words in printed
    raw = await desk.ask("show", letter.event_id, "--raw")
    assert raw.encode() == letter.value
    assert "begins with 'nobody'" in await desk.ask("show", "nobody", status=2)


async def test_a_letter_that_was_never_on_its_topic_goes_where_its_event_belongs(desk: Desk) -> None:
    event = feedback(uuid.uuid4().hex)
    letter = await desk.refuse(Record("feedback", -1, -1, None, event.to_json()), "invalid_event")
    await desk.ask("retry", letter.event_id)
    logs = [await desk.last("feedback", number) for number in range(4)]
    (record,) = [entry for log in logs for entry in log if entry.value == event.to_json()]
    assert record.key == event.key.encode()


@pytest.fixture
async def rig(embedded_bus: str, tmp_path: Path) -> AsyncIterator[StreamsRig]:
    """Yield a started collector that soon dead-letters feedback about unknown turns."""
    settings = BusSettings(address=embedded_bus)
    await catalogue.ensure(settings)
    producer = EventProducer(settings, "test", BlobStore(f"file://{tmp_path}/blobs"))
    await producer.start()
    streams = StreamsRig(tmp_path, embedded_bus, producer, "sqlite", 1)
    streams.processes = {
        "collector": [ServiceProcess("collector", tmp_path, embedded_bus, COLLECTOR__FEEDBACK_WAIT_S=0.5)],
    }
    streams.every[0].start()
    yield streams
    await producer.stop()
    streams.stop()


@pytest.mark.long
async def test_a_retried_record_has_its_effect_and_has_it_once(rig: StreamsRig) -> None:
    """The feedback came before its turn, which was still in a spool and has arrived since."""
    session = uuid.uuid4().hex
    turn = ask([user("q")], session=session)
    event = feedback(session, turn, task_id="t7")
    await rig.producer.send(event)
    letters: list[DeadLetter] = []

    async def refused() -> bool:
        letters[:] = [letter for letter in await rig.read(DeadLetter) if letter.key == event.key]
        return bool(letters)

    async def closed() -> list[Trajectory]:
        return [trajectory for trajectory in await rig.read(Trajectory) if trajectory.key == event.key]

    await eventually(refused, 30)
    await rig.producer.send(turn)
    for _ in range(2):
        await headrace("dead-letters", "retry", letters[0].event_id, "--again", "--bus", rig.bus)
    await rig.producer.send(end(session))

    async def ended() -> bool:
        return bool(await closed())

    await eventually(ended, 30)
    (trajectory,) = await closed()
    assert (trajectory.task_id, trajectory.turn_ids) == ("t7", (turn.turn_id,))
    assert len([letter for letter in await rig.read(DeadLetter) if letter.key == event.key]) == 1
