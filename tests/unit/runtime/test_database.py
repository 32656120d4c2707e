"""Opening of a service's database, turns of SQLite's transactions, and the database's part of the health page."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import AsyncAdaptedQueuePool, text

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import database as module
from headrace_runtime.storage.database import Database

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
    """The transactions wait for each other, not for SQLite's lock, which would time out."""
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
