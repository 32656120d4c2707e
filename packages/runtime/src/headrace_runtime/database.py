"""One database API: SQLAlchemy Core, async, on SQLite (a file per service) or PostgreSQL (a schema per service)."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sqlalchemy import URL, event, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from headrace_runtime import disk
from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.settings import Common, DatabaseSettings
from headrace_runtime.sqlite_driver import Driver
from headrace_schemas.redaction import HIDDEN

_BUSY_TIMEOUT_MS = 30_000
_CHECKPOINT_PAGES = 200
"""SQLite copies its log into the database within some commit. At its own 1,000 pages such a transaction of a
large database takes 28 ms; at 200 none takes 20, and the work in all is the same (`make bench NAME=state`)."""
_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    f"busy_timeout={_BUSY_TIMEOUT_MS}",
    f"wal_autocheckpoint={_CHECKPOINT_PAGES}",
)


class Database:
    """A service's own state. `transaction` is the only way in; on SQLite transactions run one at a time."""

    def __init__(self, engine: AsyncEngine, schema: str | None) -> None:
        self.engine = engine
        self.schema = schema
        self._one_writer = asyncio.Lock() if self.sqlite else None
        self._trouble: str | None = None

    @classmethod
    def open(cls, service: str, common: Common) -> Database:
        """Connects lazily; `headrace_runtime.migrations.upgrade` makes the tables. Raises `SettingError`."""
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
        return self.engine.dialect.name == "sqlite"

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """All or nothing. Raises `Unavailable` for what another try may mend (connection, lock, serialization)."""
        async with self._one_writer or contextlib.nullcontext():
            try:
                async with self.engine.begin() as connection:
                    yield connection
                self._trouble = None
            except (DBAPIError, ConnectionError, TimeoutError) as error:
                unavailable = self._unavailable(error)
                if unavailable is None:
                    raise
                raise unavailable from error

    def _unavailable(self, error: Exception) -> Unavailable | None:
        """None for what no other try would mend."""
        if disk.is_full(error):
            place = self.engine.url.database if self.sqlite else f"the disk of database server {self.engine.url.host}"
            full = disk.no_room(str(place))
            self._trouble = str(full)
            return full
        return Unavailable(f"database: {error.__class__.__name__}: {error}") if is_passing(error) else None

    async def close(self) -> None:
        await self.engine.dispose()

    async def ready(self) -> bool | str:
        """Whether a trivial query works now and the last transaction found room, or why not (for the health page)."""
        if self._trouble is not None:
            return self._trouble
        try:
            async with self.engine.connect() as connection:
                await connection.execute(text("SELECT 1"))
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
        connection.isolation_level = None  # SQLAlchemy's own BEGIN below, not the driver's implicit one
        cursor = connection.cursor()
        for pragma in _PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # a read that later writes must not deadlock with another

    @event.listens_for(engine.sync_engine, "invalidate")
    def _abandon(connection: Any, _record: object, _error: object) -> None:
        """End the transaction of a cancelled task: its open cursor would keep it, and its lock, past the close."""
        with contextlib.suppress(ValueError):  # closed already
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


def is_passing(error: BaseException) -> bool:
    """Return whether another try may mend `error`: a lost connection, a lock, a serialization failure, a full disk."""
    if disk.is_full(error) or isinstance(error, ConnectionError | TimeoutError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error, OperationalError):
        return not _is_value_error(error)
    return error.connection_invalidated or _serialization(error)


def _is_value_error(error: OperationalError) -> bool:
    """Return whether SQLite reports a statement or a stored value as an `OperationalError`: it fails at every try."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_ERROR or str(error.orig).startswith("Could not decode to UTF-8")


def _serialization(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) in {"40001", "40P01", "57P01", "57P02", "57P03"}
