"""The console follows a real bus: its counts equal the account, and texts are read by their offsets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from headrace_console.read_model import follower, queries, tables
from headrace_console.read_model.follower import TOPICS, RecordReader, TopicFollower
from headrace_console.users import Scope
from headrace_operations.from_topics import read_turn_account
from headrace_runtime.clock import SystemClock
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import Offsets
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import migrations
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_schemas import Turn
from tests.support.seeds import draw_seed
from tests.unit.console.test_counts import random_history


async def _follow(common: Common, database: Database, stop_after: int | None = None) -> None:
    """Follow the bus to its end, or, as if killed, until `stop_after` batches were applied."""
    batches = 0
    applied = asyncio.Event()

    def changed() -> None:
        nonlocal batches
        batches += 1
        applied.set()

    blobs = BlobStore.open(common)
    reader = TopicFollower(common.bus, database, blobs, SystemClock(), changed, titles=True, retention_days=30)
    task = asyncio.create_task(reader.run())
    try:
        async with asyncio.timeout(60):
            while batches != stop_after:
                await applied.wait()
                applied.clear()
                if stop_after is None and await is_at_end(common, database):
                    return
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
    await migrations.upgrade(database, "headrace_console")
    for batches in stops:
        await _follow(common, database, stop_after=batches)
    await _follow(common, database)
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
