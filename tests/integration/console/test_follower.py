"""Tests of the console on a real bus: counts, texts and dead letters.

The counts equal the turn account, and texts are read by their offsets. A dry run predicts the result of a retry, and
decisions have the name of the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace.topics import connected
from headrace_console.read_model import follower, queries, tables
from headrace_console.read_model.follower import TOPICS, RecordReader, TopicFollower
from headrace_console.settings import Scope
from headrace_operations.dead_letters import Letter, Selection, read, read_snapshot
from headrace_operations.from_topics import read_turn_account
from headrace_runtime.clock import SystemClock
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import Offsets
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Record, encode
from headrace_runtime.settings.sections import BusSettings, Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database, migrate
from headrace_schemas import Turn
from tests.support.presence import draw_seed
from tests.support.turns import feedback, turn
from tests.unit.console.support import BY_PAGE, Stand, form_token
from tests.unit.console.test_counts import random_history

_READ_S_MAX = 0.1
"""Less than half of the time for which the bus holds a request of other consumers."""


async def follow(
    common: Common, database: Database, announce: Callable[[], object] = lambda: None, stop_after: int | None = None
) -> None:
    """Read the bus to its end, or stop after `stop_after` batches as if killed.

    `announce` is called after each batch.
    """
    batches = 0
    applied = asyncio.Event()

    def changed(_topics: object) -> None:
        nonlocal batches
        batches += 1
        announce()
        applied.set()

    blobs = BlobStore.open(common)
    reader = TopicFollower(common.bus, database, blobs, SystemClock(), changed, titles=True, retention_days=30)
    task = asyncio.create_task(reader.run())
    try:
        async with asyncio.timeout(60):
            while batches != stop_after:
                if stop_after is None and await is_at_end(common, database):
                    return
                await applied.wait()
                applied.clear()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def is_at_end(common: Common, database: Database) -> bool:
    async with database.transaction() as tx:
        reached = {(row.topic, row.partition): row.next_offset for row in await tx.execute(tables.positions.select())}
    ends = Offsets(common.bus, None, "test-console-ends")
    await ends.start()
    try:
        topic_ends = {topic: await ends.ends(topic) for topic in TOPICS}
    finally:
        await ends.stop()
    return all(reached.get((topic, part), 0) >= end for topic in TOPICS for part, end in topic_ends[topic].items())


@pytest.mark.parametrize("stops", [(), (1, 2, 1)], ids=["without a stop", "killed three times"])
async def test_counts_of_a_followed_bus_equal_the_account(
    own_bus: str, tmp_path: Path, stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_BATCH_MAX", 20)
    common = Common.model_validate({"data_dir": tmp_path, "bus": {"address": own_bus}})
    await topics.ensure(common.bus)
    blobs = BlobStore.open(common)
    producer = EventProducer(common.bus, "headrace/test", blobs)
    await producer.start()
    events = random_history(random.Random(draw_seed()), 40)
    for event in events:
        await producer.send(event)
    await producer.stop()
    account = await read_turn_account(own_bus)
    database = Database.open("console", common)
    await migrate(database, "headrace_console")
    for batches in stops:
        await follow(common, database, stop_after=batches)
    await follow(common, database)
    async with database.transaction() as tx:
        counts = await queries.counts(tx, Scope(None))
        rows = (await tx.execute(tables.turns.select().where(tables.turns.c.log_offset >= 0))).all()
    assert (counts.trained, counts.waiting, counts.dropped) == (account.trained, account.waiting, account.dropped)
    reader = RecordReader(common.bus, blobs, SystemClock())
    try:
        positions = [(row.partition, row.log_offset) for row in rows]
        texts = await reader.read("turns", [*positions, (0, 10**9)])
        assert set(texts) == set(positions), "a place beyond the end is missing, and nothing else"
        rows_by_position = {(row.partition, row.log_offset): row for row in rows}
        for position, event in texts.items():
            assert isinstance(event, Turn)
            assert event.usage.prompt_tokens == rows_by_position[position].prompt_tokens
    finally:
        await reader.close()
        await database.close()


async def test_last_record_is_read_again_without_waiting_for_the_next_one(own_bus: str, tmp_path: Path) -> None:
    common = Common.model_validate({"data_dir": tmp_path, "bus": {"address": own_bus}})
    await topics.ensure(common.bus)
    blobs = BlobStore.open(common)
    producer = EventProducer(common.bus, "headrace/test", blobs)
    await producer.start()
    call = turn("a")
    await producer.send(call)
    await producer.stop()
    ends = Offsets(common.bus, None, "test-console-ends")
    await ends.start()
    positions = [(partition, 0) for partition, end in (await ends.ends("turns")).items() if end]
    await ends.stop()
    reader, durations_s = RecordReader(common.bus, blobs, SystemClock()), []
    try:
        for _ in range(8):
            began_s = time.perf_counter()
            assert list((await reader.read("turns", positions)).values()) == [call]
            durations_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(0.05)  # a rater reads, and meanwhile the consumer would request further records
    finally:
        await reader.close()
    assert min(durations_s[1:]) < _READ_S_MAX, durations_s


GROUP = {"service": "collector", "topic": "feedback", "reason": "unknown_target"}


@dataclass
class Desk:
    """A console that reads a bus with dead letters, and the browser of an operator."""

    stand: Stand
    bus: BusSettings
    producer: EventProducer
    blobs: BlobStore
    client: httpx2.AsyncClient

    async def refuse(self, number: int, *, is_valid: bool = True) -> None:
        event = feedback(f"f{number}")
        outgoing = await encode(event, "headrace/gateway", self.blobs)
        value = outgoing.value if is_valid else b"{no json"
        record = Record("feedback", 1, number, outgoing.key, value, tuple(outgoing.headers))
        await self.producer.send(dead_letter("collector", record, "unknown_target", f"feedback {number} has no target"))

    async def follow(self) -> None:
        """Wait until the console has read all dead letters and decisions."""
        common = Common(data_dir=self.stand.data_dir, bus=self.bus)
        async with asyncio.timeout(30):
            while not await is_at_end(common, self.stand.console.database):  # noqa: ASYNC110 (another process reads)
                await asyncio.sleep(0.1)

    async def letters(self) -> list[Letter]:
        async with connected(self.bus.address) as connection:
            return [letter async for letter in read(connection, Selection(), await read_snapshot(connection))]

    async def post(self, path: str, **fields: str) -> str:
        form = {"form_token": await form_token(self.client), **fields}
        reply = await self.client.post(path, data=form, headers=BY_PAGE)
        assert reply.status_code == 200, reply.text
        return reply.text


def group_form() -> dict[str, str]:
    return {"service": GROUP["service"], "topic": GROUP["topic"], "kind": GROUP["reason"]}


@pytest.fixture
async def desk(own_bus: str, tmp_path: Path) -> AsyncIterator[Desk]:
    bus = BusSettings(address=own_bus)
    await topics.ensure(bus)
    stand = Stand(tmp_path, bus=bus)
    await migrate(stand.console.database, "headrace_console")
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    producer = EventProducer(bus, "headrace/test", blobs)
    await producer.start()
    following = asyncio.create_task(stand.console.follower.run())
    yield Desk(stand, bus, producer, blobs, await stand.signed_in("operator"))
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    await producer.stop()
    await stand.console.close()


async def test_retry_of_many_letters_does_what_the_dry_run_has_foreseen(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(230):
        await desk.refuse(number, is_valid=number % 10 != 0)
    await desk.follow()
    assert ">230<" in (await desk.client.get("/dead-letters")).text
    reads: list[set[int]] = []
    read = RecordReader.read

    def count_partitions(self: RecordReader, topic: str, positions: Sequence[tuple[int, int]]) -> Any:
        reads.append({partition for partition, _ in positions})
        return read(self, topic, positions)

    with monkeypatch.context() as patched:
        patched.setattr(RecordReader, "read", count_partitions)
        plan = (await desk.client.get("/dead-letters/plan", params=GROUP)).text
    assert "207 of 230 letters would be retried" in plan
    partitions = set[int]().union(*reads)
    assert len(reads) == 3
    assert len(partitions) > 1
    assert sum(map(len, reads)) < len(partitions) + len(reads), "the dry run reads a partition several times"
    assert not any(letter.decisions for letter in await desk.letters())
    first = await desk.post("/dead-letters/retry", **group_form())
    assert "180 letters retried, 20 held back" in first
    after = re.search(r'name="after" value="([^"]+)"', first)
    assert after is not None
    second = await desk.post("/dead-letters/retry", **group_form(), after=after[1])
    assert "27 letters retried, 3 held back" in second
    assert "last letters of the group" in second
    letters = await desk.letters()
    assert sum(letter.state == "retried" for letter in letters) == 207
    assert {letter.decisions[0].by for letter in letters if letter.decisions} == {"operator"}
    assert all((letter.letter.value == b"{no json") == (letter.state == "open") for letter in letters)
    await desk.follow()
    assert ">23<" in (await desk.client.get("/dead-letters")).text
    assert "0 letters retried, 23 held back" in await desk.post("/dead-letters/retry", **group_form())


async def test_discard_records_the_reason_and_the_user(desk: Desk) -> None:
    for number in range(3):
        await desk.refuse(number)
    await desk.follow()
    await desk.post("/dead-letters/discard", **group_form(), reason="sent by a load test")
    await desk.follow()
    decisions = [letter.decisions[0] for letter in await desk.letters()]
    assert {(decision.action, decision.reason, decision.by) for decision in decisions} == {
        ("discarded", "sent by a load test", "operator")
    }
    assert "No service has refused" in (await desk.client.get("/dead-letters")).text
    assert ">3<" in (await desk.client.get("/dead-letters?state=discarded")).text


async def test_letter_page_shows_the_refused_record(desk: Desk) -> None:
    await desk.refuse(1, is_valid=False)
    await desk.follow()
    (letter,) = await desk.letters()
    page: Any = (await desk.client.get(f"/dead-letters/{letter.id}")).text
    assert "{no json" in page
    assert "feedback 1 has no target" in page
