"""Group commit: one thread runs all write operations, and commits all waiting operations with one fsync."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from headrace_broker.errors import Code, Damaged, Rejected
from headrace_broker.inspection import is_damage
from headrace_broker.stats import Stats
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import disk

T = TypeVar("T")
log = get_logger(__name__)
_FULL_INTERVAL_S = 0.5


class CachedState(Protocol):
    """State in memory that caches a part of the file, and must follow the writer's commits and rollbacks."""

    def flush(self) -> Sequence[Any]:
        """Write the changed state to the file before a commit. Return the changes that are published in the event loop
        after the commit."""
        ...

    def reload(self) -> None:
        """Read the state from the file again after a rollback."""
        ...


class _Job(NamedTuple):
    operation: Callable[[], Any]
    future: asyncio.Future[Any]


class _Outcome(NamedTuple):
    future: asyncio.Future[Any]
    result: Any
    error: Exception | None


class Writer:
    """Thread that runs write operations in the order of `submit`, many of them in one transaction.

    An operation may raise `Rejected` before its first write; only its own caller gets this exception. If a commit fails
    (a full disk), all its operations fail with STORAGE_ERROR and have no effect, and the writer continues with the next
    operations. Any other exception of an operation is a bug: it is set on the future `failed`, and the process must
    end.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        state: Sequence[CachedState],
        publish: Callable[[Sequence[Any]], None],
        stats: Stats,
        *,
        committed: Callable[[sqlite3.Connection], None] = lambda db: None,
        batch_max: int = 1000,
    ) -> None:
        self._db = db
        self._state = state
        self._publish = publish
        self._stats = stats
        self._committed = committed
        self._batch_max = batch_max
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self.trouble: str | None = None
        """The reason why the last commit with changes failed, or None if it succeeded."""

    def start(self) -> None:
        """Start the writer's thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Commit all submitted operations, and end the thread."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        self.failed.cancel()

    def submit(self, operation: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `operation` for the writer's thread. Return a future that gets its result once its changes are durable.

        Must be called in the event loop. Cancelling the caller does not cancel the operation.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(operation, future))
        return future

    def _run(self) -> None:
        try:
            while (jobs := self._take())[0] is not None:
                self._commit([job for job in jobs if job])
                if jobs[-1] is None:
                    return
        except Exception as error:  # noqa: BLE001 (handed to the event loop, which ends the process)
            self._loop.call_soon_threadsafe(self._fail, error)

    def _take(self) -> list[_Job | None]:
        jobs = [self._jobs.get()]
        while jobs[-1] is not None and len(jobs) < self._batch_max:
            try:
                jobs.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return jobs

    def _commit(self, jobs: list[_Job]) -> None:
        started, written = time.perf_counter(), self._db.total_changes
        changes: list[Any] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            outcomes = [self._outcome(job) for job in jobs]
            for state in self._state:
                changes += state.flush()
            self._db.execute("COMMIT")
            self._committed(self._db)
            if self._db.total_changes > written:
                self._count(len(jobs), time.perf_counter() - started)
        except sqlite3.Error as error:
            if is_damage(error):
                raise Damaged(f"the broker's file: {error}") from error
            self._roll_back(error)
            failure = Rejected(Code.STORAGE_ERROR, self.trouble or "")
            outcomes = [_Outcome(job.future, None, failure) for job in jobs]
            changes = []
        self._loop.call_soon_threadsafe(self._deliver, changes, outcomes)

    @staticmethod
    def _outcome(job: _Job) -> _Outcome:
        try:
            return _Outcome(job.future, job.operation(), None)
        except Rejected as error:
            return _Outcome(job.future, None, error)

    def _count(self, operations: int, seconds: float) -> None:
        self.trouble = None
        self._stats.commits += 1
        self._stats.commit_operations += operations
        self._stats.commit_seconds += seconds

    def _roll_back(self, error: sqlite3.Error) -> None:
        path = self._db.execute("PRAGMA database_list").fetchone()[2]
        trouble = str(disk.full_error(path)) if disk.is_full(error) else f"the broker's file: {error}"
        if self.trouble is None:
            log.error("commit_failed", error=trouble, remedy="free disk space; acknowledged records are safe")
        self.trouble = trouble
        self._forget()
        self._stats.commit_failures += 1

    def _forget(self) -> None:
        """Roll back the transaction, and read the cached states from the file again. If a full disk prevents this,
        repeat it."""
        while True:
            try:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                for state in self._state:
                    state.reload()
            except sqlite3.Error as error:
                if not disk.is_full(error):
                    raise
                time.sleep(_FULL_INTERVAL_S)
            else:
                return

    def _deliver(self, changes: Sequence[Any], outcomes: list[_Outcome]) -> None:
        self._publish(changes)
        for future, result, error in outcomes:
            if future.done():
                continue  # the caller was cancelled
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
                future.exception()  # marks it as retrieved, so that asyncio does not warn

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
