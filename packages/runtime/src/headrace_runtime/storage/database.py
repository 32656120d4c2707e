"""Database of a service: SQLAlchemy Core on SQLite (one file per service) or PostgreSQL (one schema per service), and
its migrations.

The driver of SQLite switches to the connection's thread once for each statement. SQLAlchemy's adapter of aiosqlite
makes four switches: it opens a cursor, executes, fetches and closes the cursor. On a busy machine each of them waits
for the scheduler, so that a transaction of ten statements waits forty times. Here a statement is one function in that
thread, which also closes the cursor. So a cancelled task leaves no open cursor.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import aiosqlite
from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, event, make_url, text
from sqlalchemy.dialects.sqlite.aiosqlite import (
    AsyncAdapt_aiosqlite_connection,
    AsyncAdapt_aiosqlite_cursor,
    AsyncAdapt_aiosqlite_dbapi,
)
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.settings.sections import Common, DatabaseSettings
from headrace_runtime.storage import disk
from headrace_schemas.values.errors import HIDDEN

Rows = list[tuple[Any, ...]]


class _Statement:
    """Cursor for SQLAlchemy's adapter that already contains all rows of the last statement."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._rows: Rows = []
        self.description: Any = None
        self.rowcount = -1
        self.lastrowid: int | None = None
        self.arraysize = 1

    async def __aenter__(self) -> Self:
        return self

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        await self._run(lambda cursor: cursor.execute(sql, parameters))

    async def executemany(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        await self._run(lambda cursor: cursor.executemany(sql, parameters))

    async def fetchall(self) -> Rows:
        rows, self._rows = self._rows, []
        return rows

    async def close(self) -> None:
        """Do nothing, because the real cursor was closed after the statement."""

    async def _run(self, work: Callable[[sqlite3.Cursor], object]) -> None:
        def execute_and_fetch() -> tuple[Rows, Any, int, int | None]:
            cursor = self._connection._conn.cursor()
            try:
                work(cursor)
                rows = cursor.fetchall() if cursor.description else []
                return rows, cursor.description, cursor.rowcount, cursor.lastrowid
            finally:
                cursor.close()

        outcome = await self._connection._execute(execute_and_fetch)  # type: ignore[no-untyped-call]
        self._rows, self.description, self.rowcount, self.lastrowid = outcome


class _Cursor(AsyncAdapt_aiosqlite_cursor):
    __slots__ = ()

    def _make_new_cursor(self, connection: Any) -> Any:
        return _Statement(connection)


class _Connection(AsyncAdapt_aiosqlite_connection):
    __slots__ = ()
    _cursor_cls = _Cursor


class Driver(AsyncAdapt_aiosqlite_dbapi):
    """SQLite driver that runs each statement as one function in the connection's thread. It is the argument `module` of
    `create_async_engine`."""

    def __init__(self) -> None:
        super().__init__(aiosqlite, sqlite3)

    def connect(self, *args: Any, **options: Any) -> AsyncAdapt_aiosqlite_connection:
        return _Connection(self, super().connect(*args, **options)._connection)


_BUSY_TIMEOUT_MS = 30_000
_CHECKPOINT_PAGES = 200
"""Number of pages after which SQLite copies its write-ahead log into the database, within a commit. With the default of
1,000 such a commit in a large database takes 28 ms. With 200 it takes less than 20 ms, and the total work is the same
(`make bench NAME=state`)."""
_READS = "headrace_reads"
"""Execution option of a connection that only reads, and therefore takes no write lock on SQLite."""
_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    f"busy_timeout={_BUSY_TIMEOUT_MS}",
    f"wal_autocheckpoint={_CHECKPOINT_PAGES}",
)


class Database:
    """Database with the state of one service. On SQLite, only one writing transaction runs at a time."""

    def __init__(self, engine: AsyncEngine, schema: str | None) -> None:
        self.engine = engine
        self.schema = schema
        self._writer_lock = asyncio.Lock() if self.sqlite else None
        self._disk_problem: str | None = None

    @classmethod
    def open(cls, service: str, common: Common) -> Database:
        """Create the object for the database of `service`. It connects on first use.

        `migrate` must be called before use, because it creates the tables.

        Raises:
            SettingError: `database.url` is invalid.
        """
        settings = common.database
        if settings.url.get_secret_value() == "sqlite":
            folder = common.data_dir.absolute() / "db"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(_sqlite(folder / f"{service}.sqlite"), None)
        url = _url(settings)
        if url.get_backend_name() != "postgresql":
            raise SettingError("database.url", url.render_as_string(), "must be `sqlite` or start with postgresql://")
        return cls(_postgresql(url, service, settings), service)

    @property
    def sqlite(self) -> bool:
        """Whether the database is SQLite."""
        return self.engine.dialect.name == "sqlite"

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection in a transaction, which is committed at the end of the context, or rolled back by an
        exception.

        Raises:
            Unavailable: a retry may succeed (lost connection, lock, serialization failure, full disk).
        """
        async with self._writer_lock or contextlib.nullcontext():
            try:
                async with self.engine.begin() as connection:
                    yield connection
                self._disk_problem = None
            except (DBAPIError, ConnectionError, TimeoutError) as error:
                unavailable = self._unavailable(error)
                if unavailable is None:
                    raise
                raise unavailable from error

    def _unavailable(self, error: Exception) -> Unavailable | None:
        """Return `Unavailable` or `DiskFull` for an error after which a retry may succeed, or None for all other
        errors."""
        if disk.is_full(error):
            path = self.engine.url.database if self.sqlite else f"the disk of database server {self.engine.url.host}"
            full = disk.full_error(str(path))
            self._disk_problem = str(full)
            return full
        return Unavailable(f"database: {error.__class__.__name__}: {error}") if is_transient(error) else None

    async def close(self) -> None:
        await self.engine.dispose()

    async def ready(self) -> bool | str:
        """Return True if the database answers a trivial query, else False.

        If the disk was full in the last transaction, return a text about that instead. The query does not wait for a
        running transaction.
        """
        if self._disk_problem is not None:
            return self._disk_problem
        try:
            async with self.engine.connect() as connection:
                await connection.execution_options(**{_READS: True})
                await connection.execute(text("PRAGMA schema_version" if self.sqlite else "SELECT 1"))
        except (SQLAlchemyError, OSError):
            return False
        return True


def _url(settings: DatabaseSettings) -> URL:
    try:
        return make_url(settings.url.get_secret_value())
    except (SQLAlchemyError, ValueError):
        raise SettingError("database.url", HIDDEN, "is not a database URL") from None


def _sqlite(path: Path) -> AsyncEngine:
    engine = create_async_engine(URL.create("sqlite+aiosqlite", database=str(path)), module=Driver())

    @event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # disables the driver's implicit BEGIN in favour of the one below
        cursor = connection.cursor()
        for pragma in _PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        reads = connection.get_execution_options().get(_READS)
        # Without this option, a read that later writes must not deadlock with another.
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    @event.listens_for(engine.sync_engine, "invalidate")
    def _abandon(connection: Any, _record: object, _error: object) -> None:
        """Roll back the transaction of a connection after an error, because a cancelled task's open cursor would
        otherwise keep its lock."""
        with contextlib.suppress(ValueError):  # the connection is already closed
            connection.run_async(lambda driver: asyncio.shield(driver.rollback()))

    return engine


def _postgresql(url: URL, schema: str, settings: DatabaseSettings) -> AsyncEngine:
    return create_async_engine(
        url.set(drivername="postgresql+asyncpg"),
        pool_size=settings.pool_size,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={"server_settings": {"search_path": schema, "application_name": f"headrace-{schema}"}},
    )


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: after a lost connection, a lock, a serialization failure or a full disk."""
    if disk.is_full(error) or isinstance(error, ConnectionError | TimeoutError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error, OperationalError):
        return not _is_value_error(error)
    return error.connection_invalidated or _is_serialization_failure(error)


def _is_value_error(error: OperationalError) -> bool:
    """Return whether an `OperationalError` of SQLite is about a statement or a value. In this case a retry would fail
    again."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_ERROR or str(error.orig).startswith("Could not decode to UTF-8")


def _is_serialization_failure(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) in {"40001", "40P01", "57P01", "57P02", "57P03"}


_LOCK = 0x68656164  # "head"; key of the advisory lock that permits one migration at a time


async def migrate(database: Database, package: str) -> None:
    """Run the pending migrations in `<package>/migrations`. Several processes may call this at the same time.

    Raises `Unavailable` if the database does not respond, and Alembic's errors if a migration is invalid.
    """
    async with database.transaction() as connection:
        if database.schema:
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            await connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{database.schema}"'))
        await connection.run_sync(_run, package)


def _run(connection: Connection, package: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(files("headrace_runtime") / "alembic"))
    config.set_main_option("version_locations", str(files(package) / "migrations"))
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
