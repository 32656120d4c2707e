"""Knowledge of a gateway that starts while the bus is away.

Feedback about a session records the ends of the logs at its arrival: never less than the turns before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from aiokafka.partitioner import murmur2

from headrace_gateway.log_ends import LogEnds, after
from headrace_gateway.publisher import Publisher
from headrace_gateway.settings import CaptureSettings
from headrace_gateway.spool import Spool
from headrace_gateway.table_cache import TableCache
from headrace_runtime.kafka.consumer import Offsets
from headrace_runtime.kafka.wire import Outgoing, Record, decode
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Feedback, Routing
from headrace_schemas.values import ids
from tests.support.gateway import ListBus, ListProducer, routing, until

V1, V2, OTHER = "tiny@" + "1" * 16, "tiny@" + "2" * 16, "other@" + "3" * 16


@dataclass
class Topic:
    """A table with a bus that comes on the test's signal, and the rows that the gateway received."""

    rows: dict[str, Routing] = field(default_factory=dict)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    told: list[tuple[str, Routing | None]] = field(default_factory=list)

    def comes(self, *rows: Routing) -> None:
        self.rows = {row.key: row for row in rows}
        self.loaded.set()


@contextlib.asynccontextmanager
async def open_cache(path: Path, topic: Topic, wait_s: float = 0.02) -> AsyncIterator[TableCache[Routing]]:
    cache = TableCache(Routing, path, topic, lambda key, row: topic.told.append((key, row)), wait_s)
    running = asyncio.create_task(cache.run(every_s=0.01))
    try:
        yield cache
    finally:
        running.cancel()
        await asyncio.wait([running])


def file_contains(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text(encoding="utf-8")


async def known_from_before(path: Path, *rows: Routing) -> None:
    topic = Topic()
    topic.comes(*rows)
    async with open_cache(path, topic):
        await until(lambda: file_contains(path, rows[-1].key))
    assert topic.told == [], "the table itself tells what the topic has"


async def test_a_late_bus_is_stood_in_for_and_what_it_no_longer_has_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "known" / "routing"
    before = routing(V1), routing(OTHER)
    await known_from_before(path, *before)
    topic = Topic()
    async with open_cache(path, topic) as cache:
        await until(lambda: cache.used)
        assert topic.told == [(row.key, row) for row in before]
        topic.comes(routing(V2))
        await until(lambda: file_contains(path, V2))
    assert topic.told[2:] == [("other", None)]
    assert OTHER not in path.read_text(encoding="utf-8")


async def test_a_bus_in_time_is_all_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    await known_from_before(path, routing(V1))
    topic = Topic()
    topic.comes(routing(V2))
    async with open_cache(path, topic, wait_s=10) as cache:
        await until(lambda: file_contains(path, V2))
    assert topic.told == []
    assert not cache.used


async def test_a_damaged_line_costs_its_row(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    await known_from_before(path, routing(V1), routing(OTHER))
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first[: len(first) // 2] + b"\n\xff" + second[1:] + b"\n" + second)
    topic = Topic()
    async with open_cache(path, topic):
        await until(lambda: topic.told)
    assert [key for key, _ in topic.told] == ["other"]


async def test_no_file_is_nothing_known(tmp_path: Path) -> None:
    topic = Topic()
    async with open_cache(tmp_path / "none", topic) as cache:
        await asyncio.sleep(0.1)
        assert topic.told == []
        assert not cache.used
        topic.comes(routing(V1))
        await until(lambda: file_contains(tmp_path / "none", V1))


class Ends:
    """Two partitions with ends that the test sets; answers wait for `go`."""

    def __init__(self) -> None:
        self.end = 0
        self.asked = 0
        self.go = asyncio.Event()
        self.go.set()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def ends(self, _topic: str) -> Mapping[int, int]:
        self.asked += 1
        found = {0: self.end, 1: 100 + self.end}
        await self.go.wait()
        return found


def reach(ends: Ends) -> LogEnds:
    return LogEnds(cast("Offsets", ends))


async def test_who_asks_together_shares_an_answer_that_is_not_older_than_the_asking() -> None:
    ends = Ends()
    shared = reach(ends)
    ends.go.clear()
    first = asyncio.create_task(shared.ends())
    await until(lambda: ends.asked == 1)
    ends.end = 7  # a turn that was acknowledged after the first question and before the others
    tasks = [asyncio.create_task(shared.ends()) for _ in range(20)]
    await asyncio.sleep(0)
    ends.go.set()
    assert {offsets["turns"][0] for offsets in await asyncio.gather(*tasks)} == {7}
    assert (await first)["turns"][0] == 0
    assert ends.asked == 4, "two topics, two questions"


def test_the_partition_is_that_of_the_key() -> None:
    for name in "abcdef":
        key = ids.session_key("default", name)
        number = (murmur2(key.encode()) & 0x7FFFFFFF) % 2
        assert after({"turns": {0: 5, 1: 6}, "trajectories": {}}, key) == {"turns": 5 + number}


def feedback(value: float, *msg_ids: str) -> Feedback:
    key = ids.session_key("default", "s")
    return Feedback(time=datetime.now(UTC), feedback_id=str(value), session_key=key, value=value, msg_ids=msg_ids)


async def sent(record: Outgoing, blobs: BlobStore) -> Mapping[str, int] | None:
    read = Record(record.topic, 0, 0, record.key, record.value, record.headers)
    return (await decode(read, blobs)).envelope.after


async def test_what_waited_in_the_spool_says_how_far_the_logs_reach_when_it_is_sent(tmp_path: Path) -> None:
    """Turns that waited in front of it are in front of it."""
    ends, bus, blobs = Ends(), ListBus(), BlobStore((tmp_path / "blobs").as_uri())
    bus.back.clear()
    settings = CaptureSettings(bus_wait_s=0.1)
    async with Spool(tmp_path / "spool", 1 << 20) as spool:
        publisher = Publisher(
            lambda: ListProducer(bus, blobs), spool, settings, send_timeout_s=0.2, log_ends=lambda: reach(ends)
        )
        draining = asyncio.create_task(publisher.run())
        await publisher.publish(feedback(0.0), feedback(1.0, ids.response_id(ids.session_key("default", "s"))))
        ends.end = 9
        bus.back.set()
        await until(lambda: len(bus.records) == 2)
        await until(lambda: spool.events == 0)
        ends.end = 12
        await publisher.publish(feedback(2.0))
        reached = [await sent(record, blobs) for record in bus.records]
        assert [offsets["turns"] % 100 if offsets else None for offsets in reached] == [9, None, 12], (
            "a list needs no such thing"
        )
        draining.cancel()
        await asyncio.wait([draining])


async def test_one_tenant_cannot_take_the_whole_spool_and_a_refusal_says_why(tmp_path: Path) -> None:
    from headrace_gateway.refusals import ApiError

    def refusal_text(tenant: str) -> str:
        try:
            publisher.admit(tenant)
        except ApiError as error:
            return str(error)
        return ""

    bus, blobs = ListBus(), BlobStore((tmp_path / "blobs").as_uri())
    settings = CaptureSettings(bus_wait_s=0.1, spool_bytes_max=4000)
    bus.back.clear()
    async with Spool(tmp_path / "spool", 4000) as spool:
        publisher = Publisher(lambda: ListProducer(bus, blobs), spool, settings, send_timeout_s=0.2, tenants=2)
        hostile_feedback = feedback(0.0).model_copy(update={"tenant": "hostile", "comment": "x" * 2000})
        await publisher.publish(hostile_feedback)
        assert "tenant's part of the spool is full and the bus is away" in refusal_text("hostile")
        assert refusal_text("other") == ""
        await publisher.publish(hostile_feedback, hostile_feedback)
        assert "the spool is full and the bus is away" in refusal_text("other")
    async with Spool(tmp_path / "spool", 4000) as spool:
        publisher = Publisher(lambda: ListProducer(bus, blobs), spool, settings, send_timeout_s=0.2, tenants=2)
        draining = asyncio.create_task(publisher.run())
        await until(lambda: "hostile" in str(publisher._shares._bytes))
        bus.back.set()
        await until(lambda: spool.events == 0 and publisher._shares.of("hostile") == 0)
        assert refusal_text("hostile") == ""
        publisher._shares.load({"hostile": 5000})
        assert "the bus, which is there" in refusal_text("hostile"), "nobody says that the bus is away when it is not"
        draining.cancel()
        await asyncio.wait([draining])
