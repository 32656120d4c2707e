"""Threads that read the file, so that a slow disk does not block the event loop."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from headrace_broker.errors import Code, Damaged, Rejected
from headrace_broker.inspection import is_damage
from headrace_broker.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class Readers:
    """Pool of `count` threads and connections. A failing read raises `Rejected` with STORAGE_ERROR."""

    def __init__(self, store: Store, count: int) -> None:
        self._connections: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for _ in range(count):
            self._connections.put(store.connect())
        self._count = count
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with `Damaged` if the file is damaged. Then the process must end."""
        self._pool = ThreadPoolExecutor(count, "reader")

    async def run(self, read: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `read` with a connection in a reader thread, and return its result."""

        def work() -> T:
            db = self._connections.get_nowait()
            try:
                return read(db, *args, **kwargs)
            finally:
                self._connections.put(db)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except Damaged as error:
            self._report_damage(error)
            raise Rejected(Code.STORAGE_ERROR, str(error)) from error
        except sqlite3.Error as error:
            if is_damage(error):
                self._report_damage(Damaged(f"the broker's file: {error}"))
            raise Rejected(Code.STORAGE_ERROR, f"the broker's file: {error}") from error

    def _report_damage(self, error: Damaged) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # marks it as retrieved, so that asyncio does not warn

    def close(self) -> None:
        """Wait for running reads and close the connections."""
        self._pool.shutdown()
        for _ in range(self._count):
            self._connections.get_nowait().close()
