"""A statement on SQLite is one trip to the connection's thread, and behaves as before otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiosqlite
import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, delete, insert, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError

from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database

metadata = MetaData()
items = Table("things", metadata, Column("id", Integer, primary_key=True), Column("name", Text, unique=True))


@pytest.fixture
async def database(data_dir: Path) -> AsyncIterator[Database]:
    opened = Database.open("x", Common(data_dir=data_dir))
    async with opened.transaction() as tx:
        await tx.run_sync(metadata.create_all)
    yield opened
    await opened.close()


async def test_a_transaction_makes_one_trip_per_statement(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = []
    original = aiosqlite.Connection._execute

    async def counted(self: aiosqlite.Connection, *args: object) -> object:
        trips.append(args)
        return await original(self, *args)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(aiosqlite.Connection, "_execute", counted)
    async with database.transaction() as tx:
        await tx.execute(insert(items), [{"name": "a"}, {"name": "b"}])
        assert (await tx.execute(select(items.c.name))).scalars().all() == ["a", "b"]
    assert len(trips) == 5, "begin, insert, select, commit, and the pool's rollback"


async def test_results_are_what_the_stock_driver_gives(database: Database) -> None:
    async with database.transaction() as tx:
        inserted = await tx.execute(insert(items).values(name="a"))
        assert inserted.inserted_primary_key == (1,)
        both = insert(items).returning(items.c.id, sort_by_parameter_order=True)
        assert (await tx.execute(both, [{"name": "c"}, {"name": "b"}])).scalars().all() == [2, 3]
        assert (await tx.execute(update(items).values(name="z").where(items.c.id == 1))).rowcount == 1
        assert (await tx.execute(delete(items).where(items.c.id == 9))).rowcount == 0
        empty = await tx.execute(select(items).where(items.c.id == 9))
        assert (list(empty.keys()), empty.all()) == (["id", "name"], [])
        streamed = await tx.stream(select(items.c.id).order_by(items.c.id))
        assert [row.id async for row in streamed] == [1, 2, 3]


async def test_errors_keep_their_meaning_and_undo_the_transaction(database: Database) -> None:
    async with database.transaction() as tx:
        await tx.execute(insert(items).values(name="a"))
    with pytest.raises(IntegrityError):
        await twice(database, "b", "a")
    with pytest.raises(OperationalError, match="no such table"):
        await twice(database, "b", "c", "SELECT * FROM missing")
    async with database.transaction() as tx:
        assert (await tx.execute(select(items.c.name))).scalars().all() == ["a"]


async def twice(database: Database, first: str, second: str, then: str = "SELECT 1") -> None:
    async with database.transaction() as tx:
        await tx.execute(insert(items).values(name=first))
        await tx.execute(insert(items).values(name=second))
        await tx.execute(text(then))
