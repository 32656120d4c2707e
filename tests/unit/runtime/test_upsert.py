"""Insert-or-update returns its effect, on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, select

from headrace_runtime.storage.tables import StreamTables, upsert
from tests.support.streams import Bench, Service, bench

metadata = MetaData()
tables = StreamTables(metadata)
items = Table(
    "things",
    metadata,
    Column("a", Text, primary_key=True),
    Column("b", Integer, primary_key=True),
    Column("value", Integer),
    Column("note", Text),
)
KEY = {"a": "x", "b": 1}


@pytest.fixture
async def stream(database_url: str, data_dir: Path) -> AsyncIterator[Bench]:
    async with bench(Service(tables, {}), database_url, data_dir) as service_bench:
        yield service_bench


async def rows(stream: Bench) -> list[tuple[object, ...]]:
    async with stream.processor.database.transaction() as tx:
        return [tuple(row) for row in await tx.execute(select(items))]


async def test_a_row_is_inserted_then_set(stream: Bench) -> None:
    async with stream.processor.database.transaction() as tx:
        assert await upsert(tx, items, KEY, {"value": 1, "note": "first"})
        assert await upsert(tx, items, KEY, {"value": 2, "note": None})
        assert await upsert(tx, items, {**KEY, "b": 2}, {"value": 3})
    assert await rows(stream) == [("x", 1, 2, None), ("x", 2, 3, None)]


async def test_a_row_that_is_there_may_be_left_alone(stream: Bench) -> None:
    async with stream.processor.database.transaction() as tx:
        assert await upsert(tx, items, KEY, {"value": 1}, update=False)
        assert not await upsert(tx, items, KEY, {"value": 2}, update=False)
        assert not await upsert(tx, items, KEY, {}), "nothing to set"
    assert await rows(stream) == [("x", 1, 1, None)]
