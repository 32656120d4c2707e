"""Events that the bus could not take yet, in one SQLite file: durable, in order, bounded, one process at a time."""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace_gateway import metrics
from headrace_runtime.errors import HeadraceError, SettingError, Unavailable

T = TypeVar("T")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    topic TEXT NOT NULL,
    traceparent TEXT,
    value BLOB NOT NULL
)
"""
_TENANTS = """
SELECT coalesce(CASE WHEN json_valid(text) THEN json_extract(text, '$.tenant') END, ''), sum(bytes)
FROM (SELECT CAST(value AS TEXT) AS text, length(value) AS bytes FROM events) GROUP BY 1
"""


class SpoolBroken(HeadraceError):
    """The spool's file cannot be read. It may hold turns: it is never removed by itself."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """One event as it waits. `value` is its bare JSON."""

    topic: str
    value: bytes
    traceparent: str | None = None
    seq: int = 0


class Spool:
    """Use as an async context manager.

    `append` returns after fsync; appends that come together share one. `oldest` and `remove` are the drain's.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._thread = ThreadPoolExecutor(1, "spool")
        self._waiting: list[tuple[Sequence[Spooled], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self.events = 0
        """How many wait, those being written included."""
        self.bytes = 0

    async def __aenter__(self) -> Spool:
        """Raises `SettingError` when another process has this spool, `SpoolBroken` when it cannot be read."""
        await self._run(self._open)
        self._measure(0, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._writer is not None:
            await asyncio.wait([self._writer])
        await self._run(self._close)
        self._thread.shutdown()

    @property
    def full(self) -> bool:
        """No room for new work. What is already under way is still taken: that much is bounded by concurrency."""
        return self.bytes >= self._bytes_max

    async def append(self, events: Sequence[Spooled]) -> None:
        """Returns once they are on the disk. Raises `Unavailable` when the disk refuses."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((events, done))
        self._measure(len(events), sum(len(event.value) for event in events))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        try:
            await asyncio.shield(done)
        except sqlite3.Error as error:
            raise Unavailable(f"spool {self._folder}: {error}") from error

    async def tenants(self) -> dict[str, int]:
        """Bytes that wait, by the tenant that the events name."""
        return await self._run(self._tenants)

    async def oldest(self, limit: int) -> list[Spooled]:
        return await self._run(lambda: self._oldest(limit))

    async def remove(self, events: Sequence[Spooled]) -> None:
        """Forget events that `oldest` returned: the bus has them."""
        await self._run(lambda: self._remove(events[-1].seq))
        self._measure(-len(events), -sum(len(event.value) for event in events))

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            events = [event for group, _ in batch for event in group]
            try:
                await self._run(lambda events=events: self._insert(events))  # type: ignore[misc]
            except sqlite3.Error as error:
                self._measure(-len(events), -sum(len(event.value) for event in events))
                for _, done in batch:
                    done.set_exception(error)
            else:
                for _, done in batch:
                    done.set_result(None)
        self._writer = None

    def _measure(self, events: int, size_bytes: int) -> None:
        self.events += events
        self.bytes += size_bytes
        metrics.SPOOL_EVENTS.set(self.events)
        metrics.SPOOL_BYTES.set(self.bytes)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self._folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingError(
                "gateway.capture.spool_dir", str(self._folder), "belongs to another gateway process; give each its own"
            ) from None
        path = self._folder / "spool.db"
        try:
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(_SCHEMA)
            self.events, self.bytes = self._db.execute("SELECT count(*), total(length(value)) FROM events").fetchone()
        except sqlite3.Error as error:
            raise SpoolBroken(
                f"spool {path}: {error}; it may hold turns, so move it aside rather than delete it"
            ) from None
        self.bytes = int(self.bytes)

    def _tenants(self) -> dict[str, int]:
        return dict(self._db.execute(_TENANTS))

    def _close(self) -> None:
        self._db.close()
        self._lock.close()

    def _insert(self, events: Sequence[Spooled]) -> None:
        rows = [(event.topic, event.traceparent, event.value) for event in events]
        with self._db:
            self._db.executemany("INSERT INTO events (topic, traceparent, value) VALUES (?, ?, ?)", rows)

    def _oldest(self, limit: int) -> list[Spooled]:
        query = "SELECT topic, value, traceparent, seq FROM events ORDER BY seq LIMIT ?"
        return [Spooled(*row) for row in self._db.execute(query, (limit,))]

    def _remove(self, last_seq: int) -> None:
        with self._db:
            self._db.execute("DELETE FROM events WHERE seq <= ?", (last_seq,))
