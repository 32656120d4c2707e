"""A database server in memory: SQLite without threads, with one writer, failing connections and deaths within a commit.

Services use it through SQLAlchemy and our own driver and transactions. Processes share a server as they would share
PostgreSQL. The service's own migrations create the tables once; they are copied for every run.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from sqlalchemy import NullPool, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from headrace_runtime.storage import database
from headrace_runtime.storage.database import Database, Driver
from tests.simulation.loop import world
from tests.simulation.process import CURRENT, Killed, Process


class Server:
    """Database of one service."""

    def __init__(self, picture: bytes | None = None) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        if picture is not None:
            self.connection.deserialize(picture)
        self._lock = asyncio.Lock()
        self.holder: Session | None = None
        self._changes = 0

    @property
    def changed(self) -> bool:
        """Return whether the running transaction has written rows."""
        return self.connection.total_changes != self._changes

    async def begin(self, session: Session) -> None:
        await self._lock.acquire()
        self.holder = session
        try:
            session.check()
            self.connection.execute("BEGIN IMMEDIATE")
            self._changes = self.connection.total_changes
        except BaseException:
            self.release(session)
            raise

    def release(self, session: Session) -> None:
        """Roll back the session's transaction, if there is one."""
        if self.holder is session:
            if self.connection.in_transaction:
                self.connection.rollback()
            self.holder = None
            self._lock.release()

    def commit(self, session: Session) -> None:
        if self.holder is session:
            self.connection.commit()
            self.release(session)


class Session:
    """Connection of one process, in place of aiosqlite's `Connection`."""

    _connection = True

    def __init__(self, server: Server, process: Process | None) -> None:
        self._server = server
        self._process = process
        self._conn = server.connection
        self.isolation_level = None

    def check(self) -> None:
        if self._process is not None and self._process.dead:
            raise Killed(self._process.name)

    async def begin(self) -> None:
        if self._process is not None:
            await asyncio.sleep(world().bus.draw.random() * 2e-3)
            self._process.at_death.append(self._die)
        await self._server.begin(self)

    async def _execute(self, trip: Callable[[], Any]) -> Any:
        self.check()
        return trip()

    async def commit(self) -> None:
        """Commit the transaction. Most faults happen here: see `Mishaps.at_commit`."""
        self.check()
        if self._process is None or self._server.holder is not self:
            self._server.commit(self)
            return
        await asyncio.sleep(world().bus.draw.random() * world().mishaps.commit_s)
        self.check()
        mishap = world().mishaps.at_commit(self._process) if self._server.changed else None
        if mishap == "refused":
            self._server.release(self)
        elif mishap == "die_before":
            self._process.die()
            raise Killed(self._process.name)
        else:
            self._server.commit(self)
        self._forget()
        if mishap == "die_after":
            self._process.die()
            raise Killed(self._process.name)
        if mishap in ("refused", "unanswered"):
            raise sqlite3.OperationalError(f"the connection was lost: {mishap}")

    async def rollback(self) -> None:
        self._server.release(self)
        self._forget()

    async def close(self) -> None:
        await self.rollback()

    def stop(self) -> None:
        self._server.release(self)

    async def create_function(self, *_: Any, **__: Any) -> None:
        """Ignore the function that SQLAlchemy registers for regular expressions, which no service uses."""

    def _die(self) -> None:
        self._server.release(self)

    def _forget(self) -> None:
        if self._process is not None and self._die in self._process.at_death:
            self._process.at_death.remove(self._die)


class SharedDatabase(Database):
    """`Database` that several processes share, as on several machines; the server isolates their transactions."""

    @property
    def sqlite(self) -> bool:
        return False

    async def close(self) -> None:
        """Do nothing, because the engine serves every process of every run."""


def open_database(service: str) -> Database:
    return SharedDatabase(_engine(service), None)


@cache
def _engine(service: str) -> AsyncEngine:
    """Return the engine of a service. All runs share it, so that statements are compiled once."""

    async def connect(*_: Any, **__: Any) -> Any:
        return Session(_template if (process := CURRENT.get()) is None else world().databases[service], process)

    engine = create_async_engine(
        f"sqlite+aiosqlite:///{service}", module=Driver(), async_creator=connect, poolclass=NullPool
    )

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        await_only(connection.connection.driver_connection.begin())

    return engine


_template: Any = SimpleNamespace()
_pictures: dict[str, bytes] = {}


async def picture_of(service: str, package: str) -> bytes:
    """Return the image of a service's empty database. The migrations create it once per real process."""
    global _template
    if service not in _pictures:
        _template = server = Server()
        await real_upgrade(open_database(service), package)
        _pictures[service] = server.connection.serialize()
    return _pictures[service]


real_upgrade = database.migrate
