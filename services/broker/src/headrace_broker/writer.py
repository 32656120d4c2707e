"""Group commit: one thread that owns the writing connection, and one fsync for all that waited for it."""

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
from headrace_runtime import disk
from headrace_runtime.logs import get_logger

T = TypeVar("T")
log = get_logger(__name__)
_FULL_INTERVAL_S = 0.5


class Stored(Protocol):
    """In-memory state that belongs to the file."""

    def flush(self) -> Sequence[Any]:
        """Write it back before a commit; return what the event loop is to know after it."""
        ...

    def reload(self) -> None:
        """Forget what a rollback undid."""
        ...


class _Job(NamedTuple):
    operation: Callable[[], Any]
    done: asyncio.Future[Any]


class _Outcome(NamedTuple):
    done: asyncio.Future[Any]
    result: Any
    error: Exception | None


class Writer:
    """Runs operations in the order of `submit`, many to a transaction.

    An operation may raise `Rejected`, before its first write, and then only its own caller hears of it. When the commit
    fails (a full disk), all of its operations fail with STORAGE_ERROR, nothing of them is stored, and the next ones are
    tried anew. Anything else an operation raises is a bug: `failed` gets it and the process is to end.
    """

    def __init__(
        self, db: sqlite3.Connection, state: Sequence[Stored], publish: Callable[[Sequence[Any]], None], stats: Stats,
        *, committed: Callable[[sqlite3.Connection], None] = lambda db: None, batch_max: int = 1000,
    ) -> None:  # fmt: skip
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
        """Why the last commit that had something to write failed; None when it did not."""

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Commit what was submitted, then end the thread."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        self.failed.cancel()

    def submit(self, operation: Callable[[], T]) -> asyncio.Future[T]:
        """Run `operation` on the writer's thread; the future is done once it is durable.

        Called on the event loop. A caller that is cancelled gives up the answer, never the operation.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(operation, done))
        return done

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
            outcomes = [_Outcome(job.done, None, failure) for job in jobs]
            changes = []
        self._loop.call_soon_threadsafe(self._deliver, changes, outcomes)

    @staticmethod
    def _outcome(job: _Job) -> _Outcome:
        try:
            return _Outcome(job.done, job.operation(), None)
        except Rejected as error:
            return _Outcome(job.done, None, error)

    def _count(self, operations: int, seconds: float) -> None:
        self.trouble = None
        self._stats.commits += 1
        self._stats.commit_operations += operations
        self._stats.commit_seconds += seconds

    def _roll_back(self, error: sqlite3.Error) -> None:
        path = self._db.execute("PRAGMA database_list").fetchone()[2]
        trouble = str(disk.no_room(path)) if disk.is_full(error) else f"the broker's file: {error}"
        if self.trouble is None:
            log.error("commit_failed", error=trouble, remedy="free disk space; acknowledged records are safe")
        self.trouble = trouble
        self._forget()
        self._stats.commit_failures += 1

    def _forget(self) -> None:
        """Read the state again from the file. That may need memory, too, if the index grows."""
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
        for done, result, error in outcomes:
            if done.done():
                continue  # its caller gave up
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)
                done.exception()  # retrieved, so that asyncio does not warn about it

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
