"""aiosqlite driver with one switch to its thread for each statement.

SQLAlchemy's adapter makes four: it opens a cursor, executes, fetches and closes the cursor. On a busy machine each of
them waits for the scheduler, so that a transaction of ten statements waits forty times. Here a statement is one
function in the connection's thread, which also closes the cursor. So a cancelled task leaves no open cursor.
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
    """Cursor for SQLAlchemy's adapter that holds the fetched result of the last statement."""

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
        """Do nothing, because no cursor is open."""

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
    """Driver for the argument `module` of `create_async_engine`."""

    def __init__(self) -> None:
        super().__init__(aiosqlite, sqlite3)

    def connect(self, *args: Any, **options: Any) -> AsyncAdapt_aiosqlite_connection:
        return _Connection(self, super().connect(*args, **options)._connection)
