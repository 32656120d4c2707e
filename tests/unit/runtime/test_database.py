"""Tests of a service's database on SQLite and PostgreSQL.

They cover opening, transactions in turn, cancelled transactions, the health page, retryable and permanent errors,
single trips to the SQLite thread, the result of insert-or-update, and the copy of all tables from SQLite to PostgreSQL.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import (
    AsyncAdaptedQueuePool,
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    delete,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from headrace_runtime.copy_state import NotEmpty, copy
from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import database as module
from headrace_runtime.storage.database import Database, migrate
from headrace_runtime.storage.tables import StreamTables, upsert
from tests.support.servers import PostgresNode
from tests.support.streams import Bench, Service, bench

POSTGRESQL = "postgresql://headrace:secret@127.0.0.1:1/headrace"
"""Address without a listener."""


def opened(data_dir: Path, url: str = "sqlite", pool_size: int = 5) -> Database:
    settings = {"data_dir": data_dir, "database": {"url": url, "pool_size": pool_size}}
    return Database.open("test", Common.model_validate(settings))


async def test_a_service_has_a_file_in_a_folder_that_nobody_else_may_read(tmp_path: Path) -> None:
    data_dir = tmp_path / "not" / "Zoë's 100% #1?" / "yet"
    for _ in range(2):
        database = opened(data_dir)
        assert (database.sqlite, database.schema, await database.ready()) == (True, None, True)
        await database.close()
    assert (data_dir / "db" / "test.sqlite").is_file()
    assert (data_dir / "db").stat().st_mode & 0o777 == 0o700


async def test_a_commit_is_synced_keys_are_enforced_and_a_lock_is_waited_for(tmp_path: Path) -> None:
    database = opened(tmp_path)
    async with database.transaction() as tx:
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        pragmas = [(await tx.execute(text(f"PRAGMA {name}"))).scalar_one() for name in names]
    await database.close()
    assert pragmas == ["wal", 2, 1, 30_000]


async def test_transactions_on_sqlite_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transactions wait for each other in the process and not for SQLite's lock, which would time out."""
    monkeypatch.setattr(module, "_PRAGMAS", (*module._PRAGMAS, "busy_timeout=1"))
    database = opened(tmp_path)
    async with database.transaction() as tx:
        await tx.execute(text("CREATE TABLE t (x)"))

    async def work() -> None:
        async with database.transaction() as tx:
            await tx.execute(text("INSERT INTO t VALUES (1)"))
            await asyncio.sleep(0.02)

    await asyncio.gather(*(work() for _ in range(5)))
    async with database.transaction() as tx:
        assert await tx.scalar(text("SELECT count(*) FROM t")) == 5
    await database.close()


async def test_postgresql_has_a_schema_for_each_service_and_so_many_connections_as_it_may(tmp_path: Path) -> None:
    database = opened(tmp_path, POSTGRESQL, pool_size=3)
    assert (database.sqlite, database.schema) == (False, "test")
    pool = database.engine.pool
    assert isinstance(pool, AsyncAdaptedQueuePool)
    assert (pool.size(), pool._max_overflow, pool._pre_ping) == (3, 0, True)
    assert await database.ready() is False
    await database.close()


async def test_health_of_a_database_does_not_wait_for_a_running_transaction(tmp_path: Path) -> None:
    database = opened(tmp_path)
    try:
        async with database.transaction() as tx:
            await tx.execute(text("CREATE TABLE t (x INTEGER)"))
            assert await asyncio.wait_for(database.ready(), 5) is True
        assert await database.ready() is True
    finally:
        await database.close()


async def test_a_file_that_cannot_be_opened_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "db" / "test.sqlite").mkdir(parents=True)
    database = opened(tmp_path)
    assert await database.ready() is False
    await database.close()


@pytest.mark.parametrize(
    "url", ["secret", "postgresql://headrace:secret@host:port/x", "mysql://headrace:secret@host/x"]
)
def test_what_is_no_url_of_a_database_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    with pytest.raises(SettingError, match=r"database\.url") as refused:
        opened(tmp_path, url)
    assert "secret" not in str(refused.value)


async def test_cancelling_anywhere_leaves_no_lock_and_no_half_transaction(data_dir: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    database = Database.open("x", Common(data_dir=data_dir))
    async with database.transaction() as tx:
        await tx.execute(text("CREATE TABLE pairs (a INTEGER)"))

    async def work() -> None:
        while True:
            async with database.transaction() as tx:
                await tx.execute(text("INSERT INTO pairs VALUES (1)"))
                await tx.execute(text("SELECT count(*) FROM pairs"))
                await tx.execute(text("INSERT INTO pairs VALUES (1)"))

    for _ in range(30):
        task = asyncio.create_task(work())
        await asyncio.sleep(chance.random() * 0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(5), database.transaction() as tx:
            assert (await tx.scalar(text("SELECT count(*) FROM pairs"))) % 2 == 0
    await database.close()


class Refusal(Exception):
    """Error of a driver with a PostgreSQL error code."""

    def __init__(self, sqlstate: str | None) -> None:
        super().__init__("said the server")
        self.sqlstate = sqlstate


async def raised_by(folder: Path, error: Exception) -> Exception:
    database = Database.open("test", Common(data_dir=folder))
    try:
        async with database.transaction():
            raise error
    except Exception as seen:  # noqa: BLE001 - it is what the test is about
        return seen
    finally:
        await database.close()


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "57P01", "57P02", "57P03"])
async def test_a_transaction_that_lost_a_race_or_its_server_is_tried_again(tmp_path: Path, sqlstate: str) -> None:
    """The codes mean serialization failure, deadlock, and a server that shuts down, crashed or starts."""
    assert isinstance(await raised_by(tmp_path, DBAPIError("", {}, Refusal(sqlstate))), Unavailable)


@pytest.mark.parametrize("sqlstate", ["23505", "22P05", "42601", None])
async def test_what_is_wrong_with_the_statement_is_not(tmp_path: Path, sqlstate: str | None) -> None:
    error = DBAPIError("", {}, Refusal(sqlstate))
    assert await raised_by(tmp_path, error) is error


async def test_a_lost_connection_is_tried_again(tmp_path: Path) -> None:
    lost_connection = DBAPIError("", {}, Refusal(None), connection_invalidated=True)
    for error in (lost_connection, OperationalError("", {}, Refusal(None)), ConnectionResetError(), TimeoutError()):
        assert isinstance(await raised_by(tmp_path, error), Unavailable)


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


stream_metadata = MetaData()
tables = StreamTables(stream_metadata)
numbered_items = Table(
    "things",
    stream_metadata,
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
        return [tuple(row) for row in await tx.execute(select(numbered_items))]


async def test_a_row_is_inserted_then_set(stream: Bench) -> None:
    async with stream.processor.database.transaction() as tx:
        assert await upsert(tx, numbered_items, KEY, {"value": 1, "note": "first"})
        assert await upsert(tx, numbered_items, KEY, {"value": 2, "note": None})
        assert await upsert(tx, numbered_items, {**KEY, "b": 2}, {"value": 3})
    assert await rows(stream) == [("x", 1, 2, None), ("x", 2, 3, None)]


async def test_a_row_that_is_there_may_be_left_alone(stream: Bench) -> None:
    async with stream.processor.database.transaction() as tx:
        assert await upsert(tx, numbered_items, KEY, {"value": 1}, update=False)
        assert not await upsert(tx, numbered_items, KEY, {"value": 2}, update=False)
        assert not await upsert(tx, numbered_items, KEY, {}), "nothing to set"
    assert await rows(stream) == [("x", 1, 1, None)]


SERVICES = ("collector", "judge", "registry", "scorer")
ROWS = 3


def value_of(column: Any, number: int) -> object:
    """Return the value for `number`: equal numbers give equal values in columns of one type, so that foreign keys
    hold."""
    kind = column.type
    if column.nullable and number == 0:
        return None
    if isinstance(kind, Boolean):
        return number % 2 == 0
    if isinstance(kind, LargeBinary):
        return b"\x00\xff" * number
    if isinstance(kind, Float | Numeric) and not isinstance(kind, Integer):
        return 0.1 + number
    return number + 2**31 * ("_ms" in column.name) if isinstance(kind, Integer) else f"ü{number}"


@pytest.fixture
async def databases(postgres: PostgresNode, tmp_path: Path) -> AsyncIterator[tuple[Database, Database]]:
    name = f"copy_{uuid.uuid4().hex[:12]}"
    common = Common.model_validate({"data_dir": tmp_path})
    server = Common.model_validate({"data_dir": tmp_path, "database": {"url": postgres.empty_url()}})
    source, target = Database.open(name, common), Database.open(name, server)
    yield source, target
    async with target.transaction() as tx:
        await tx.execute(text(f'DROP SCHEMA IF EXISTS "{name}" CASCADE'))
    await source.close()
    await target.close()


async def fill(source: Database) -> list[Table]:
    def tables(connection: Connection) -> list[Table]:
        metadata = MetaData()
        metadata.reflect(connection)
        return [table for table in metadata.sorted_tables if table.name != "schema_version"]

    async with source.transaction() as tx:
        reflected = await tx.run_sync(tables)
        for table in reflected:
            rows = [{c.name: value_of(c, number) for c in table.columns} for number in range(ROWS)]
            await tx.execute(insert(table), rows)
    return reflected


@pytest.mark.postgres
@pytest.mark.parametrize("service", SERVICES)
async def test_every_table(service: str, databases: tuple[Database, Database]) -> None:
    source, target = databases
    await migrate(source, f"headrace_{service}")
    tables = await fill(source)
    assert len(tables) > 4
    for _ in range(2):
        assert await copy(service, f"headrace_{service}", source, target) == {table.name: ROWS for table in tables}
    async with target.transaction() as tx:
        outbox = next(table for table in tables if table.name == "outbox")
        row = {c.name: value_of(c, ROWS) for c in outbox.columns if c.name != "id"}
        await tx.execute(insert(outbox), row)
        ids = (await tx.execute(select(outbox.c.id).order_by(outbox.c.id))).scalars().all()
        assert ids == [0, 1, 2, 3], "what is numbered goes on where it was"
    with pytest.raises(NotEmpty, match=r"table outbox has 4 rows in the target that differ from the 3 .*DROP SCHEMA"):
        await copy(service, f"headrace_{service}", source, target)
