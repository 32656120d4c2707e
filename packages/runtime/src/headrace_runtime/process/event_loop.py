"""Protection of the event loop: worker threads for work of unbounded size, and measurement of blocks, which delay every
request of the process.

`busy` is the CPU time of the loop's thread in one iteration of the loop, from the return of its selector to the next
call, in which the callbacks that were ready together run. It does not depend on the load of the machine. `late` is the
wall time of an iteration, or the delay of the selector's return, minus the time that the thread waited for a core. It
also includes blocking calls, and threads that kept the interpreter lock.

The selector itself is measured, so that even short blocks are seen without a frequent timer. A timer wakes the loop
only every `INTERVAL_S`, because an idle loop cannot be late.

Python's threads share one interpreter lock. A worker thread keeps the event loop responsive as long as no single
library call holds that lock for long. `headrace_runtime.kafka.wire` bounds the calls that would, such as JSON parsing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

from headrace_runtime.metrics import EVENT_LOOP_BLOCK_SECONDS

INTERVAL_S = 0.25
_WINDOW_S = 15.0
"""Seconds of one window. The gauges report the longest block of the last one to two windows."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_SCHEDSTAT_BYTES_MAX = 128
_thread = threading.local()
"""`schedstat`: the open statistics file of the thread, which is closed when the thread ends."""
_SHORT_S = 0.005
"""Blocks up to this many seconds are recorded without subtracting the time that the thread waited for a core."""
_WAITED_AGE_S = 0.02
"""Seconds after which the thread's waiting time for a core is read again. Reading it in each iteration would cost too
much."""
T = TypeVar("T")
_LARGE_BYTES = 131_072
"""Work on more bytes runs in a thread of its own, so that it does not delay smaller work."""
_REST, _REST_FROM_S, _REST_S_MAX = 2.0, 0.02, 5.0
"""If work took longer than `_REST_FROM_S`, the same tenant's next work starts only after a pause of `_REST` times that
duration, at most `_REST_S_MAX`, while other tenants have requests. Their work gets the interpreter lock in the
meantime."""
_COMPANY_S = 1.0
_INLINE_BYTES_MAX = 32_768
"""Work on more bytes runs in a thread, because it would delay the event loop noticeably: parsing may take half a
microsecond per byte."""


class LoopWatch:
    """Measurement of how long callbacks block an event loop, exported as gauges.

    `run` must run in the measured loop; `take` returns the measures to tests.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._windows = {"busy": [0.0, 0.0], "late": [0.0, 0.0]}
        self._window_s = self._began_s = self._waited_at_s = time.monotonic()
        self._cpu_s = time.thread_time()
        self._waited_s = 0.0
        for kind in self._windows:
            EVENT_LOOP_BLOCK_SECONDS.labels(kind).set_function(self._longest(kind))

    async def run(self) -> None:
        """Measure the event loop until cancelled."""
        self._began_s, self._cpu_s, self._waited_s = time.monotonic(), time.thread_time(), waited_for_core_s()
        with _measure_selector(asyncio.get_running_loop(), self):
            while True:  # noqa: ASYNC110 (this is a timer and waits for no condition)
                await asyncio.sleep(self._interval_s)

    def end_turn(self) -> None:
        """Record the duration of the present iteration, just before the loop waits for events."""
        now_s = time.monotonic()
        wall_s, busy_s = now_s - self._began_s, 0.0
        if wall_s > self._windows["busy"][0]:  # otherwise its CPU time cannot be the longest either
            busy_s = time.thread_time() - self._cpu_s
            self._note("busy", busy_s)
        self._note_late(wall_s, at_least_s=busy_s)
        if now_s - self._window_s > _WINDOW_S:
            self._window_s = now_s
            for window in self._windows.values():
                window[:] = [0.0, window[0]]

    def begin_turn(self, late_s: float) -> None:
        """Record the delay with which the selector returned, and begin the next iteration."""
        self._note_late(late_s)
        self._began_s, self._cpu_s = time.monotonic(), time.thread_time()
        if self._began_s - self._waited_at_s > _WAITED_AGE_S:
            self._waited_at_s, self._waited_s = self._began_s, waited_for_core_s()

    def take(self, kind: str = "busy") -> float:
        """Return the longest block since the last call of this method, in seconds. `kind` is `busy` or `late`."""
        longest = max(self._windows[kind])
        self._windows[kind][:] = [0.0, 0.0]
        return longest

    def _note_late(self, late_s: float, *, at_least_s: float = 0.0) -> None:
        if late_s > _SHORT_S:
            late_s = max(late_s - (waited_for_core_s() - self._waited_s), at_least_s)
        self._note("late", late_s)

    def _note(self, kind: str, block_s: float) -> None:
        self._windows[kind][0] = max(self._windows[kind][0], block_s)

    def _longest(self, kind: str) -> Callable[[], float]:
        return lambda: max(self._windows[kind])


class _MeasuredSelect:
    """Replacement of the `select` method of a loop's selector, which informs the `LoopWatch` objects of that loop."""

    def __init__(self, select: Callable[[float | None], Any]) -> None:
        self._select = select
        self.watches: tuple[LoopWatch, ...] = ()

    def __call__(self, timeout: float | None = None) -> Any:
        for watch in self.watches:
            watch.end_turn()
        began_s = time.monotonic()
        events = self._select(timeout)
        late_s = 0.0 if timeout is None else time.monotonic() - began_s - max(timeout, 0.0)
        for watch in self.watches:
            watch.begin_turn(late_s)
        return events


@contextlib.contextmanager
def _measure_selector(loop: asyncio.AbstractEventLoop, watch: LoopWatch) -> Iterator[None]:
    """Measure the selector of `loop` for `watch` while the body runs. Several watches may measure one selector.

    asyncio has no public access to its selector. Loops without one, of other packages, are not measured.
    """
    selector: Any = getattr(loop, "_selector", None)
    if selector is None:
        yield
        return
    if not isinstance(selector.select, _MeasuredSelect):
        selector.select = _MeasuredSelect(selector.select)
    measured: _MeasuredSelect = selector.select
    measured.watches += (watch,)
    try:
        yield
    finally:
        measured.watches = tuple(other for other in measured.watches if other is not watch)
        if not measured.watches:
            del selector.select  # this restores the method of its class


async def watch_loop(work: Awaitable[None]) -> None:
    """Run `work`, and meanwhile measure how long callbacks block its event loop."""
    watching = asyncio.create_task(LoopWatch().run(), name="loop-watch")
    try:
        await work
    finally:
        watching.cancel()


def waited_for_core_s() -> float:
    """Return the seconds for which this thread has waited for a core so far, or 0 if the system does not report it.

    The statistics file stays open, because opening and closing it would release the interpreter lock two more times,
    and a loop that competes with worker threads waits for the lock after each release.
    """
    try:
        if not hasattr(_thread, "schedstat"):
            _thread.schedstat = _SCHEDSTAT.open("rb", buffering=0)
        return int(os.pread(_thread.schedstat.fileno(), _SCHEDSTAT_BYTES_MAX, 0).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


async def run_off_loop(size_bytes: int, work: Callable[[], T]) -> T:
    """Run `work` and return its result. Work on many bytes runs in a thread of the default executor.

    Args:
        size_bytes: the approximate number of bytes that `work` processes.
        work: the function to run.
    """
    return await asyncio.to_thread(work) if size_bytes > _INLINE_BYTES_MAX else work()


class _TenantTurns:
    """Locks by which the tasks of each tenant run one at a time in one kind of worker threads.

    After a long task the tenant pauses while other tenants work. So a tenant with many large bodies delays its own
    requests rather than those of others.
    """

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, int] = {}
        self._rests_until_s: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def take(self, tenant: str, has_other_tenants: Callable[[], bool]) -> AsyncIterator[None]:
        """Wait until the tenant's earlier tasks and its pause are over, and hold its lock during the block.

        Args:
            tenant: the tenant.
            has_other_tenants: function that returns whether other tenants have work. If not, the tenant does not pause.
        """
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        try:
            async with self._locks.setdefault(tenant, asyncio.Lock()):
                rest_s = self._rests_until_s.get(tenant, 0.0) - time.monotonic()
                if rest_s > 0 and has_other_tenants():
                    await asyncio.sleep(rest_s)
                began_s = time.monotonic()
                try:
                    yield
                finally:
                    ended_s = time.monotonic()
                    if ended_s - began_s > _REST_FROM_S:
                        self._forget_rests(ended_s)
                        self._rests_until_s[tenant] = ended_s + min(_REST * (ended_s - began_s), _REST_S_MAX)
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._locks[tenant]

    def _forget_rests(self, now_s: float) -> None:
        for tenant in [tenant for tenant, until_s in self._rests_until_s.items() if until_s <= now_s]:
            del self._rests_until_s[tenant]


class WorkerThreads:
    """Worker threads of one service for work of unbounded size. The queue is not bounded, so callers must bound the
    number of waiting requests."""

    def __init__(self, threads: int, inline_bytes: int = 16_384) -> None:
        """Create the pool.

        Args:
            threads: the number of threads for small work. Large work has one thread of its own.
            inline_bytes: work on at most so many bytes runs in the event loop, because a thread would cost more.
        """
        self._inline_bytes = inline_bytes
        self._small = ThreadPoolExecutor(threads, "worker")
        self._large = ThreadPoolExecutor(1, "worker-large")
        self._small_turns, self._large_turns = _TenantTurns(), _TenantTurns()
        self._seen_s: dict[str, float] = {}
        """When each tenant last had work, for the tenants that were seen in the last second."""

    async def run(self, size_bytes: int, work: Callable[[], T], tenant: str | None = None) -> T:
        """Run `work` and return its result, in the event loop or in a worker thread, depending on `size_bytes`.

        Args:
            size_bytes: the approximate number of bytes that `work` processes.
            work: the function to run.
            tenant: the tenant whose request needs the work. Its larger pieces of work run one after the other.
        """
        if tenant is not None:
            self._note(tenant)
        if size_bytes <= self._inline_bytes:
            return work()
        is_large = size_bytes > _LARGE_BYTES
        pool = self._large if is_large else self._small
        turns = self._large_turns if is_large else self._small_turns
        turn = (
            turns.take(tenant, lambda: self._has_other_tenants(tenant))
            if tenant is not None
            else contextlib.nullcontext()
        )
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, work)

    def _note(self, tenant: str) -> None:
        now_s = time.monotonic()
        self._seen_s.pop(tenant, None)
        self._seen_s[tenant] = now_s  # the newest is the last
        while now_s - next(iter(self._seen_s.values())) > _COMPANY_S:
            del self._seen_s[next(iter(self._seen_s))]

    def _has_other_tenants(self, tenant: str) -> bool:
        """Return whether tenants other than `tenant` had work in the last second."""
        since_s = time.monotonic() - _COMPANY_S
        return any(name != tenant and seen_s > since_s for name, seen_s in self._seen_s.items())

    def close(self) -> None:
        """Cancel work that has not begun. Running work continues to its end."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)
