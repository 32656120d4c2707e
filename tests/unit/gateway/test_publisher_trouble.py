"""Tests of the publisher if the bus, the disk or the connection fails, and of the cause that it reports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.capture.publisher import Publisher
from headrace_gateway.capture.spool import Spool, Spooled
from headrace_gateway.requests.feedback import LogEnds
from headrace_gateway.settings import CaptureSettings
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.wire import Outgoing, Record, decode
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import DeadLetter, Event, Feedback
from tests.support.gateway import ListBus, ListProducer, feedback, numbers, running, until
from tests.support.machine import full_error


class Connections:
    """Factory of producers that counts how many were created, abandoned and stopped.

    While the event `taking` is clear, the bus accepts connections but no records.
    """

    def __init__(self, folder: Path) -> None:
        self.bus = ListBus()
        self.blobs = BlobStore((folder / "blobs").as_uri())
        self.taking = asyncio.Event()
        self.taking.set()
        self.producer_count = 0
        self.abandoned = 0
        self.stopped = 0

    def __call__(self) -> ListProducer:
        self.producer_count += 1
        return _Producer(self)


class _Producer(ListProducer):
    def __init__(self, connections: Connections) -> None:
        super().__init__(connections.bus, connections.blobs)
        self._connections = connections

    async def stop(self) -> None:
        await asyncio.sleep(0.01)
        self._connections.stopped += 1

    async def abandon(self) -> None:
        self._connections.abandoned += 1

    async def send_raw(self, records: Iterable[Outgoing]) -> None:
        await self._connections.taking.wait()
        await super().send_raw(records)


def publisher_of(
    make: Callable[[], ListProducer],
    spool: Spool,
    send_timeout_s: float = 30,
    tenants: int | None = None,
    **capture: Any,
) -> Publisher:
    settings = CaptureSettings.model_validate({"bus_wait_s": 0.02, **capture})
    more: dict[str, Any] = {} if tenants is None else {"tenants": tenants}
    return Publisher(make, spool, settings, send_timeout_s=send_timeout_s, **more)


async def fill(publisher: Publisher, spool: Spool) -> None:
    while not spool.full:
        await publisher.publish(feedback(1))


async def test_a_disk_without_room_matters_only_while_events_go_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = Connections(tmp_path)
    async with Spool(tmp_path / "spool", 100_000) as spool:
        publisher = publisher_of(connections, spool)

        def lack() -> str | None:
            return publisher.refusal_reason

        monkeypatch.setattr(Spool, "trouble", "no room")
        assert lack() == "no room", "there is no connection yet"
        async with running(publisher):
            await until(lambda: publisher.connected)
            assert lack() is None
            connections.taking.clear()
            await publisher.publish(feedback(1))
            assert lack() == "no room"
            connections.taking.set()
            await until(lambda: lack() is None)


@pytest.mark.parametrize("direct", [False, True], ids=["at the start", "after direct ones"])
async def test_a_full_spool_that_is_being_sent_does_not_blame_the_bus(tmp_path: Path, direct: bool) -> None:
    connections = Connections(tmp_path)
    async with Spool(tmp_path / "spool", 1024) as spool:
        publisher = publisher_of(connections, spool)
        if direct:
            async with running(publisher):
                await until(lambda: publisher.connected)
                await publisher.publish(feedback(0))
        await fill(publisher, spool)
        assert "the bus is unavailable" in str(publisher.refusal_reason), "there is no connection"
        connections.taking.clear()
        async with running(publisher):
            await until(lambda: publisher.connected)
            assert "is being sent to the bus" in str(publisher.refusal_reason)
            connections.taking.set()
            await until(lambda: publisher.refusal_reason is None)


async def test_a_bus_that_takes_nothing_of_the_spool_for_long_is_away(tmp_path: Path) -> None:
    connections = Connections(tmp_path)
    connections.taking.clear()
    async with Spool(tmp_path / "spool", 1024) as spool:
        publisher = publisher_of(connections, spool, send_timeout_s=0.05)
        await fill(publisher, spool)
        async with running(publisher):
            await until(lambda: publisher.connected)
            await until(lambda: "the bus is unavailable" in str(publisher.refusal_reason))
            connections.taking.set()
            await until(lambda: publisher.refusal_reason is None)


async def test_a_bus_that_did_not_take_the_last_event_is_away(tmp_path: Path) -> None:
    connections = Connections(tmp_path)
    async with Spool(tmp_path / "spool", 1024) as spool:
        publisher = publisher_of(connections, spool)
        async with running(publisher):
            await until(lambda: publisher.connected)
            connections.taking.clear()
            await fill(publisher, spool)
            assert "the bus is unavailable" in str(publisher.refusal_reason)


async def test_one_of_several_tenants_may_fill_its_part_and_not_a_byte_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, bytes_max = feedback(1), 8192
    size = len(event.to_json())

    async def is_refused(tenants: int | None, share_bytes: int, tenant: str = "default") -> bool:
        async with Spool(tmp_path / f"{tenants}-{share_bytes}-{tenant}", bytes_max) as spool:
            publisher = publisher_of(Connections(tmp_path), spool, tenants=tenants, spool_bytes_max=bytes_max)
            monkeypatch.setattr("headrace_gateway.capture.publisher.TENANT_SHARE", share_bytes / bytes_max)
            await publisher.publish(event)
            with contextlib.suppress(ApiError):
                publisher.admit(tenant)
                return False
            return True

    assert await is_refused(2, size)
    assert not await is_refused(2, size + 1)
    assert not await is_refused(2, size, "other")
    assert not await is_refused(1, size), "who is alone has all of it"
    assert not await is_refused(None, size)


async def test_what_neither_the_bus_nor_the_disk_took_is_given_up_with_its_connection(tmp_path: Path) -> None:
    connections = Connections(tmp_path)
    async with Spool(tmp_path / "spool", 100_000) as spool:
        publisher = publisher_of(connections, spool)
        async with running(publisher):
            await until(lambda: publisher.connected)
            connections.taking.clear()
            with full_error(in_place=False), pytest.raises(Unavailable):
                await publisher.publish(feedback(1))
            assert (connections.abandoned, publisher._shares.of("default")) == (1, 0)
            connections.taking.set()
            await until(lambda: connections.producer_count == 2 and publisher.connected)
            await publisher.publish(feedback(2))
            assert numbers(connections.bus) == [2]


async def test_a_connection_that_hangs_is_made_anew(tmp_path: Path) -> None:
    connections = Connections(tmp_path)

    class Hanging(_Producer):
        async def start(self) -> None:
            await connections.taking.wait()

    def make() -> ListProducer:
        connections.producer_count += 1
        return Hanging(connections)

    connections.taking.clear()
    async with Spool(tmp_path / "spool", 1024) as spool:
        publisher = publisher_of(make, spool, send_timeout_s=0.05)
        async with running(publisher):
            await until(lambda: connections.producer_count == 2)
            connections.taking.set()
            await until(lambda: publisher.connected)


async def test_a_bus_that_is_away_is_not_asked_without_a_pause(tmp_path: Path) -> None:
    connections = Connections(tmp_path)
    connections.bus.back.clear()
    async with Spool(tmp_path / "spool", 1024) as spool, running(publisher_of(connections, spool)):
        await until(lambda: connections.producer_count)
        for _ in range(200):
            await asyncio.sleep(0)
        assert connections.producer_count < 20


async def test_a_connection_is_closed_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    connections = Connections(tmp_path)
    stopped: list[object] = []

    class Offsets:
        async def start(self) -> None: ...

        async def stop(self) -> None:
            stopped.append(self)

    async with Spool(tmp_path / "spool", 1024) as spool:
        publisher = Publisher(
            connections, spool, CaptureSettings(), send_timeout_s=30, log_ends=lambda: LogEnds(cast("Any", Offsets()))
        )
        async with running(publisher):
            await until(lambda: publisher.connected)
        assert (connections.stopped, len(stopped), publisher.connected) == (1, 1, False)


async def test_what_is_still_on_its_way_to_the_disk_is_asked_for_again(tmp_path: Path) -> None:
    class Late(Spool):
        call_count = 0

        async def oldest(self, limit: int) -> list[Spooled]:
            self.call_count += 1
            return [] if self.call_count == 1 else await super().oldest(limit)

    connections = Connections(tmp_path)
    async with Late(tmp_path / "spool", 1024) as spool:
        await spool.append([Spooled("feedback", feedback(1).to_json())])
        async with running(publisher_of(connections, spool)):
            await until(lambda: numbers(connections.bus) == [1])


async def test_a_damaged_event_becomes_a_dead_letter_with_what_is_left_of_it(tmp_path: Path) -> None:
    class Damaged(Spool):
        async def oldest(self, limit: int) -> list[Spooled]:
            return [replace(item, damage="0.spool, byte 7") for item in await super().oldest(limit)]

    connections = Connections(tmp_path)
    async with Damaged(tmp_path / "spool", 10_000_000) as spool:
        await spool.append([Spooled("feedback", b"x" * 800_000)])
        async with running(publisher_of(connections, spool)):
            await until(lambda: connections.bus.records)
    (sent,) = connections.bus.records
    letter = (await decode(Record(sent.topic, 0, 0, sent.key, sent.value, sent.headers), connections.blobs)).event
    assert isinstance(letter, DeadLetter)
    assert (letter.reason, letter.error) == ("spool_damaged", "0.spool, byte 7")
    assert (letter.source_topic, letter.source_partition, letter.source_offset) == ("spool", None, None)
    assert letter.value == b"x" * 700_000


async def test_between_the_events_of_one_request_others_have_their_turn(tmp_path: Path) -> None:
    connections, turns = Connections(tmp_path), 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with Spool(tmp_path / "spool", 10_000) as spool:
        publisher = publisher_of(connections, spool, bus_wait_s=5)
        async with running(publisher):
            await until(lambda: publisher.connected)
            task = asyncio.create_task(count_turns())
            await publisher.publish(*map(feedback, range(10)))
            task.cancel()
            assert turns >= 9
            assert (numbers(connections.bus), spool.events) == (list(range(10)), 0)


async def test_events_are_counted_by_where_they_became_durable(tmp_path: Path) -> None:
    def counts() -> list[float]:
        label_sets = [{"topic": "feedback", "where": where} for where in ("bus", "spool")]
        return [REGISTRY.get_sample_value("headrace_gateway_published_total", labels) or 0.0 for labels in label_sets]

    connections, before = Connections(tmp_path), counts()
    async with Spool(tmp_path / "spool", 10_000) as spool:
        publisher = publisher_of(connections, spool, bus_wait_s=5)
        await publisher.publish(feedback(1))
        async with running(publisher):
            await until(lambda: publisher.connected and spool.events == 0)
            await publisher.publish(feedback(2), feedback(3))
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 1]


@pytest.mark.parametrize("error", [ValueError, OverflowError, RecursionError, KeyError, InvalidEvent])
async def test_a_spooled_event_that_cannot_be_sent_is_named_and_the_others_are_sent(
    tmp_path: Path, error: type[Exception]
) -> None:
    """The spool is on disk, so an event that cannot be sent would block it again after every restart."""

    class Strict(_Producer):
        async def encode(self, event: Event, *rest: Any, **named: Any) -> Outgoing:
            if isinstance(event, Feedback) and event.value == 2:
                raise InvalidEvent("too_large", "it is") if error is InvalidEvent else error("poison \x00 \ud83d")
            return await super().encode(event, *rest, **named)

    class StrictConnections(Connections):
        def __call__(self) -> ListProducer:
            return Strict(self)

    connections = StrictConnections(tmp_path)
    async with Spool(tmp_path / "spool", 10_000_000) as spool:
        await spool.append([Spooled("feedback", feedback(number).to_json()) for number in range(5)])
        await spool.append([Spooled("no-such-topic", b"{}")])
        async with running(publisher_of(connections, spool)):
            await until(lambda: not spool.events)
    letters = [record for record in connections.bus.records if record.topic == "dead-letters"]
    assert len(letters) == 2
    reasons = [DeadLetter.from_json(letter.value or b"").reason for letter in letters]
    assert sorted(reasons) == ["undecodable", "unsendable"]
    sent = [
        Feedback.from_json(record.value or b"").value
        for record in connections.bus.records
        if record.topic == "feedback"
    ]
    assert set(sent) == {0, 1, 3, 4}
