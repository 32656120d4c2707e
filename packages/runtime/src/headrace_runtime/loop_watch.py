"""Measures how long the event loop was blocked. A block delays every request that the process serves.

`busy` is the CPU time that the loop's own thread spent in one turn of the loop, from the return of its selector to the
next call: the callbacks that were ready together. It means the same on a loaded machine. `late` is the wall time of a
turn, or the lateness of the selector's return, less the time that the thread waited for a core: it also sees calls that
blocked, and a thread that kept the interpreter's lock while the loop was due.

The selector itself is measured, so every block is seen without a timer that would have to be as short as a block. The
one timer wakes the loop every `INTERVAL_S`: a loop without any has no moment at which it could be late.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from headrace_runtime.metrics import EVENT_LOOP_BLOCK_SECONDS

INTERVAL_S = 0.25
_WINDOW_S = 15.0
"""The gauges tell the longest of the last one to two windows."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_SHORT_S = 0.005
"""Up to this, lateness is noted without a look at how long the thread waited for a core."""
_WAITED_AGE_S = 0.02
"""Age at which that look is repeated before a turn. At each turn it would cost more than what it measures."""


class LoopWatch:
    """`run` it in the loop that is watched. `take` is for tests, the gauges are for everybody else."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._windows = {"busy": [0.0, 0.0], "late": [0.0, 0.0]}
        self._window_s = self._began_s = self._waited_at_s = time.monotonic()
        self._cpu_s = time.thread_time()
        self._waited_s = 0.0
        for kind in self._windows:
            EVENT_LOOP_BLOCK_SECONDS.labels(kind).set_function(self._longest(kind))

    async def run(self) -> None:
        """For ever."""
        self._began_s, self._cpu_s, self._waited_s = time.monotonic(), time.thread_time(), waited_for_core_s()
        with _measured(asyncio.get_running_loop(), self):
            while True:  # noqa: ASYNC110 (it waits for nothing: it is the timer)
                await asyncio.sleep(self._interval_s)

    def end_turn(self) -> None:
        """Note the turn that ends: the loop is about to wait for events."""
        now_s = time.monotonic()
        wall_s, busy_s = now_s - self._began_s, 0.0
        if wall_s > self._windows["busy"][0]:  # else its CPU time is no record either
            busy_s = time.thread_time() - self._cpu_s
            self._note("busy", busy_s)
        self._note_late(wall_s, at_least_s=busy_s)
        if now_s - self._window_s > _WINDOW_S:
            self._window_s = now_s
            for window in self._windows.values():
                window[:] = [0.0, window[0]]

    def begin_turn(self, late_s: float) -> None:
        """Note by how much the loop waited longer for events than it wanted to, and begin a turn."""
        self._note_late(late_s)
        self._began_s, self._cpu_s = time.monotonic(), time.thread_time()
        if self._began_s - self._waited_at_s > _WAITED_AGE_S:
            self._waited_at_s, self._waited_s = self._began_s, waited_for_core_s()

    def take(self, kind: str = "busy") -> float:
        """The longest block in seconds since it was last taken."""
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
    """The `select` of a loop's selector, with the watches of that loop around it."""

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
def _measured(loop: asyncio.AbstractEventLoop, watch: LoopWatch) -> Iterator[None]:
    """Measure the selector of `loop` for `watch` while the body runs. Several watches may share it, in any order.

    asyncio has no public way to its selector, and a loop of another make may have none: its turns are not seen then.
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
            del selector.select  # the method of its class is back


async def watched(work: Awaitable[None]) -> None:
    """`work`, with its event loop watched."""
    watching = asyncio.create_task(LoopWatch().run(), name="loop-watch")
    try:
        await work
    finally:
        watching.cancel()


def waited_for_core_s() -> float:
    """How long this thread was ready to run while others ran; 0 where the system does not tell."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
