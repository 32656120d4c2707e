"""aiosqlite with one switch to its thread for each statement.

The stock adapter makes four: open a cursor, execute, fetch, close it. On a busy machine each waits for the scheduler,
and a transaction of ten statements takes forty such waits. Here a statement is one function on the connection's thread,
whose cursor is closed when it returns, so a task that is cancelled meanwhile leaves none open either.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Self

import aiosqlite
from sqlalchemy.dialects.sqlite.aiosqlite import (
    AsyncAdapt_aiosqlite_connection,
    AsyncAdapt_aiosqlite_cursor,
    AsyncAdapt_aiosqlite_dbapi,
)

Rows = list[tuple[Any, ...]]


class _Statement:
    """What SQLAlchemy's adapter takes for a driver's cursor: the outcome of the last statement, already fetched."""

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
        """Nothing is open."""

    async def _run(self, work: Callable[[sqlite3.Cursor], object]) -> None:
        def trip() -> tuple[Rows, Any, int, int | None]:
            cursor = self._connection._conn.cursor()
            try:
                work(cursor)
                rows = cursor.fetchall() if cursor.description else []
                return rows, cursor.description, cursor.rowcount, cursor.lastrowid
            finally:
                cursor.close()

        outcome = await self._connection._execute(trip)  # type: ignore[no-untyped-call]
        self._rows, self.description, self.rowcount, self.lastrowid = outcome


class _Cursor(AsyncAdapt_aiosqlite_cursor):
    __slots__ = ()

    def _make_new_cursor(self, connection: Any) -> Any:
        return _Statement(connection)


class _Connection(AsyncAdapt_aiosqlite_connection):
    __slots__ = ()
    _cursor_cls = _Cursor


class Driver(AsyncAdapt_aiosqlite_dbapi):
    """Give an instance to `create_async_engine` as its `module`."""

    def __init__(self) -> None:
        super().__init__(aiosqlite, sqlite3)

    def connect(self, *args: Any, **options: Any) -> AsyncAdapt_aiosqlite_connection:
        return _Connection(self, super().connect(*args, **options)._connection)
