"""Tests of the publisher: turns reach the bus or the spool in order, even if the bus fails (P1).

A response ends only after its turn is durable, and an unavailable bus delays no client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from unittest import mock

import pytest

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.capture.publisher import Publisher
from headrace_gateway.capture.spool import Spool, Spooled
from headrace_gateway.capture.spool_file import scan
from headrace_gateway.settings import CaptureSettings
from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.wire import Outgoing
from headrace_runtime.process import logs
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import DeadLetter, SessionEnd, Turn
from headrace_schemas.values.base import utcnow
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import KEY, PARTITIONS, ListBus, ListProducer, feedback, gateway, numbers, running, until
from tests.support.machine import full_error


def end(number: int) -> SessionEnd:
    return SessionEnd(time=utcnow(), end_id=str(number), session_key=KEY)


@contextlib.asynccontextmanager
async def publishing(folder: Path, bus: ListBus, **settings: float) -> AsyncIterator[Publisher]:
    capture = CaptureSettings.model_validate({"bus_wait_s": 0.05, **settings})
    blobs = BlobStore((folder / "blobs").as_uri())
    with mock.patch("headrace_gateway.capture.publisher.DRAIN_BATCH", 7):
        async with Spool(folder / "spool", capture.spool_bytes_max) as spool:
            publisher = Publisher(lambda: ListProducer(bus, blobs), spool, capture, send_timeout_s=0.3)
            async with running(publisher):
                yield publisher


async def test_with_the_bus_there_nothing_touches_the_disk(tmp_path: Path) -> None:
    bus = ListBus()
    async with publishing(tmp_path, bus) as publisher:
        await until(lambda: publisher.connected)
        await publisher.publish(feedback(1), feedback(2))
        assert numbers(bus) == [1, 2]
        assert publisher._spool.events == 0


async def test_an_outage_costs_one_bounded_wait_and_keeps_the_order(tmp_path: Path) -> None:
    bus = ListBus()
    async with publishing(tmp_path, bus) as publisher:
        await until(lambda: publisher.connected)
        await publisher.publish(feedback(0))
        bus.back.clear()
        for number in range(1, 30):
            await publisher.publish(feedback(number))
        assert bus.kept_waiting <= 2, "only the first one waits for the bus, and the spool on its way to it"
        assert numbers(bus) == [0]
        assert publisher._spool.events == 29
        bus.back.set()
        await until(lambda: publisher._spool.events == 0)
        await publisher.publish(feedback(30))
        assert list(dict.fromkeys(numbers(bus))) == list(range(31)), "first appearances, in order, none lost"


async def test_while_the_spool_drains_new_events_queue_behind_it(tmp_path: Path) -> None:
    bus = ListBus()
    drain_may_end = asyncio.Event()

    class Slow(ListProducer):
        async def send_raw(self, records: Iterable[Outgoing]) -> None:
            listed = list(records)
            if any(b'"feedback_id":"0"' in (record.value or b"") for record in listed):
                await drain_may_end.wait()
            await super().send_raw(listed)

    async with Spool(tmp_path / "spool", 10_000) as spool:
        await spool.append([Spooled("feedback", feedback(number).to_json()) for number in range(3)])
        publisher = Publisher(
            lambda: Slow(bus, BlobStore(tmp_path.as_uri())), spool, CaptureSettings(), send_timeout_s=30
        )
        async with running(publisher):
            await until(lambda: publisher.connected)
            for number in range(3, 6):
                await publisher.publish(feedback(number))
            assert numbers(bus) == [], "the bus is there, and yet nothing overtakes what waits"
            drain_may_end.set()
            await until(lambda: spool.events == 0)
            await publisher.publish(feedback(6))
    assert numbers(bus) == list(range(7))


async def test_it_starts_without_a_bus_and_finds_it_later(tmp_path: Path) -> None:
    bus = ListBus()
    bus.back.clear()
    async with publishing(tmp_path, bus) as publisher:
        await publisher.publish(feedback(1))
        assert not publisher.connected
        bus.back.set()
        await until(lambda: numbers(bus) == [1])


async def test_a_spool_that_a_dead_process_left_is_drained(tmp_path: Path) -> None:
    async with Spool(tmp_path / "spool", 1000) as spool:
        await spool.append([Spooled("feedback", feedback(number).to_json()) for number in range(3)])
    bus = ListBus()
    async with publishing(tmp_path, bus) as publisher:
        await publisher.publish(feedback(3))
        await until(lambda: numbers(bus) == [0, 1, 2, 3])


async def test_an_end_is_sent_only_after_the_events_before_it_are_acknowledged(tmp_path: Path) -> None:
    """Ends and turns are on different topics, so an end in the same produce request could overtake its turn."""
    bus = ListBus()
    bus.back.clear()
    sent: list[list[str]] = []

    class Grouping(ListProducer):
        async def send_raw(self, records: Iterable[Outgoing]) -> None:
            listed = list(records)
            await super().send_raw(listed)
            sent.append([record.topic for record in listed])

    async with Spool(tmp_path / "spool", 10_000) as spool:
        events = [feedback(1), feedback(2), end(1), feedback(3), end(2)]
        await spool.append([Spooled(event.topic, event.to_json()) for event in events])
        publisher = Publisher(
            lambda: Grouping(bus, BlobStore(tmp_path.as_uri())), spool, CaptureSettings(), send_timeout_s=1
        )
        async with running(publisher):
            bus.back.set()
            await until(lambda: spool.events == 0)
    assert sent == [["feedback", "feedback"], ["session-ends"], ["feedback"], ["session-ends"]]


@pytest.mark.parametrize("away", [False, True], ids=["direct", "spooled"])
async def test_a_commit_reaches_every_partition(tmp_path: Path, away: bool) -> None:
    bus = ListBus()
    if away:
        bus.back.clear()
    async with publishing(tmp_path, bus) as publisher:
        if not away:
            await until(lambda: publisher.connected)
        await publisher.publish(SessionEnd(time=utcnow(), end_id="c", scope="tenant", reason="commit"))
        bus.back.set()
        await until(lambda: len(bus.records) == PARTITIONS)
        copies = bus.events(SessionEnd)
        assert [copy.partition for copy in copies] == [record.partition for record in bus.records] == [0, 1, 2, 3]
        assert len({copy.event_id for copy in copies}) == PARTITIONS


async def test_the_trace_of_a_spooled_event_goes_on(tmp_path: Path) -> None:
    bus = ListBus()
    bus.back.clear()
    async with publishing(tmp_path, bus) as publisher:
        with logs.span(None):
            trace = logs.trace_id()
            await publisher.publish(feedback(1))
        bus.back.set()
        await until(lambda: bus.records)
        parent = dict(bus.records[0].headers)["traceparent"].decode()
        assert parent.split("-")[1] == trace


async def test_a_full_spool_refuses_new_work_loudly(tmp_path: Path) -> None:
    bus = ListBus()
    bus.back.clear()
    async with publishing(tmp_path, bus, spool_bytes_max=1024) as publisher:
        for number in range(20):
            await publisher.publish(feedback(number))
        with pytest.raises(ApiError) as caught:
            publisher.admit("default")
        assert (caught.value.status, caught.value.retry_after_s) == (503, 5)
        bus.back.set()
        await until(lambda: publisher.refusal_reason is None)
        publisher.admit("default")


async def test_a_producer_that_died_is_replaced(tmp_path: Path) -> None:
    """The sender of aiokafka can fail permanently, for example after data loss in the broker; then a new producer is
    needed."""
    bus = ListBus()
    dead: list[bool] = [False]

    class Mortal(ListProducer):
        async def start(self) -> None:
            dead[0] = False

        async def send_raw(self, records: Iterable[Outgoing]) -> None:
            if dead[0]:
                raise Unavailable("fatal, for ever")
            await super().send_raw(records)

    async with Spool(tmp_path / "spool", 10_000) as spool:
        publisher = Publisher(
            lambda: Mortal(bus, BlobStore(tmp_path.as_uri())), spool, CaptureSettings(), send_timeout_s=1
        )
        async with running(publisher):
            await until(lambda: publisher.connected)
            dead[0] = True
            await publisher.publish(feedback(1))
            await until(lambda: numbers(bus) == [1])


@pytest.mark.parametrize("makes_topics", [True, False])
async def test_a_long_outage_is_waited_for_with_one_producer_and_topics_are_made_again(
    tmp_path: Path, makes_topics: bool
) -> None:
    """A producer that is abandoned while it retries would continue for ever beside its successor."""
    bus = ListBus()
    producers, prepared = 0, 0

    def make() -> ListProducer:
        nonlocal producers
        producers += 1
        return ListProducer(bus, BlobStore(tmp_path.as_uri()))

    async def prepare() -> None:
        nonlocal prepared
        prepared += 1
        if not bus.back.is_set():
            raise Unavailable("the bus is away")

    async with Spool(tmp_path / "spool", 10_000) as spool:
        settings = CaptureSettings(bus_wait_s=0.02)
        made_again = prepare if makes_topics else None
        publisher = Publisher(make, spool, settings, send_timeout_s=0.05, prepare=made_again)
        async with running(publisher):
            await until(lambda: publisher.connected)
            bus.back.clear()
            await publisher.publish(feedback(1))
            await until(lambda: prepared > 3 if makes_topics else publisher._away)
            bus.back.set()
            await until(lambda: numbers(bus) == [1])
            assert producers == 1


async def test_a_spooled_event_of_another_release_becomes_a_dead_letter(tmp_path: Path) -> None:
    async with Spool(tmp_path / "spool", 1000) as spool:
        await spool.append([Spooled("feedback", b'{"from": "the future"}')])
    bus = ListBus()
    async with publishing(tmp_path, bus):
        await until(lambda: bus.records)
        (letter,) = bus.events(DeadLetter)
        assert (letter.reason, letter.source_topic, letter.value) == (
            "invalid_event",
            "feedback",
            b'{"from": "the future"}',
        )
        assert (letter.source_partition, letter.source_offset) == (None, None), "it never had a place in its topic"


def spooled(folder: Path) -> list[Turn]:
    """Return the events in the spool file, read as by another process."""
    scanned = [
        scanned.event
        for path in sorted((folder / "spool").glob("*.spool"))
        for scanned in scan(path.read_bytes(), 0, "")
    ]
    return [Turn.from_json(event.value) for event in scanned if event is not None and event.topic == Turn.topic]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_the_end_of_a_response_waits_for_the_acknowledgement(tmp_path: Path, stream: bool) -> None:
    replica = FakeReplica()
    capture = CaptureSettings(bus_wait_s=30)
    async with replica.running(), gateway(tmp_path, replica, capture=capture) as served:
        await served.chat()
        served.bus.back.clear()
        calling = asyncio.create_task(served.chat(stream=stream))
        await until(lambda: len(replica.requests) == 2)
        await asyncio.sleep(0.15)
        assert not calling.done()
        served.bus.back.set()
        assert (await calling).status_code == 200
        assert len(served.turns) == 2


async def test_a_stream_shows_its_last_word_before_it_is_captured_and_done_only_after(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, capture=CaptureSettings(bus_wait_s=30)) as served:
        served.bus.back.clear()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if '"finish_reason":"stop"' in line:
                    break
            rest = asyncio.create_task(_rest(lines))
            await asyncio.sleep(0.15)
            assert served.turns == []
            assert not rest.done()
            served.bus.back.set()
            assert "[DONE]" in await rest
            assert len(served.turns) == 1


async def _rest(lines: AsyncIterator[str]) -> str:
    """Return the next event of the stream, or an empty string if there is none."""
    async for line in lines:
        if line:
            return line
    return ""


async def test_an_outage_fails_no_request_and_loses_no_turn(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat("before")
        served.bus.back.clear()
        ids = []
        for number in range(12):
            answer = await served.chat(f"question {number}", headers={"X-Session-Id": "run"}, stream=number % 3 == 0)
            assert answer.status_code == 200
            ids.append(answer.headers["x-request-id"])
            assert spooled(tmp_path)[-1].turn_id == ids[-1], "on the disk before the client saw the end"
        assert served.bus.kept_waiting <= 2, "the first call, and the spool on its way to the bus"
        assert (await served.client.get("/health")).status_code == 200
        served.bus.back.set()
        await until(lambda: served.spool.events == 0)
        assert list(dict.fromkeys(turn.turn_id for turn in served.turns))[1:] == ids


async def test_with_the_spool_full_new_calls_are_refused_and_none_is_lost(tmp_path: Path) -> None:
    replica = FakeReplica()
    capture = CaptureSettings(bus_wait_s=0.01, spool_bytes_max=4096)
    async with replica.running(), gateway(tmp_path, replica, capture=capture) as served:
        served.bus.back.clear()
        answers = [await served.chat() for _ in range(12)]
        statuses = [answer.status_code for answer in answers]
        accepted = statuses.count(200)
        assert statuses == [200] * accepted + [503] * (12 - accepted)
        assert 0 < accepted < 12
        assert answers[-1].headers["retry-after"] == "5"
        assert "spool is full" in answers[-1].json()["error"]["message"]
        assert (await served.client.get("/health")).json()["checks"]["capture"] is False
        assert len(spooled(tmp_path)) == accepted
        served.bus.back.set()
        await until(lambda: served.spool.events == 0)
        assert (await served.chat()).status_code == 200
        assert len({turn.turn_id for turn in served.turns}) == accepted + 1


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_without_bus_and_disk_the_client_does_not_see_an_end(tmp_path: Path, stream: bool) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        served.bus.back.clear()
        await served.chat()
        with full_error(in_place=False):
            answer = await served.chat("refused", stream=stream)
        if stream:
            assert "[DONE]" not in answer.text
            assert '"not_recorded"' in answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_recorded")
            assert f"no space left on {tmp_path / 'spool'}" in answer.json()["error"]["message"]
        served.bus.back.set()
        await until(lambda: served.spool.events == 0)
        assert [turn.messages[0].text for turn in served.turns] == ["hello"], "what was refused does not come later"


async def test_a_full_disk_refuses_new_work_and_not_what_is_under_way(tmp_path: Path) -> None:
    replica = FakeReplica()
    capture = CaptureSettings(bus_wait_s=0.01, spool_reserve_bytes=1_048_576)
    async with replica.running(), gateway(tmp_path, replica, capture=capture) as served:
        served.bus.back.clear()
        with full_error():
            answers = [await served.chat(f"{number} " + "x" * 4000) for number in range(40)]
            accepted = [answer.status_code for answer in answers].count(200)
            assert 8 < accepted < 40, "what was allocated before holds these"
            assert {answer.status_code for answer in answers[accepted:]} == {503}
            assert "disk: no space left on" in answers[-1].json()["error"]["message"]
            health = (await served.client.get("/health")).json()
            assert "no space left" in health["reasons"]["capture"]
        await until(lambda: served.spool.trouble is None)
        assert (await served.chat()).status_code == 200
        served.bus.back.set()
        await until(lambda: served.spool.events == 0)
        assert len({turn.turn_id for turn in served.turns}) == accepted + 1
