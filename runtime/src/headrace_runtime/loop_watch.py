"""Measures how long the event loop was blocked. A block delays every request that the process serves.

A task wakes up every 20 ms and looks at how late it is. `busy` is the CPU time that the loop's own thread spent between
two wake-ups: one callback that computed for long. It means the same on a loaded machine. `late` is how late it woke up
less the time that the thread waited for a core: it also sees a thread that kept the interpreter's lock, and calls
that blocked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace_runtime.metrics import EVENT_LOOP_BLOCK_SECONDS

INTERVAL_S = 0.02
_WINDOW_S = 15.0
"""The gauges tell the longest of the last one to two windows."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class LoopWatch:
    """`run` it in the loop that is watched. `take` is for tests, the gauges are for everybody else."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._windows = {"busy": [0.0, 0.0], "late": [0.0, 0.0]}
        for kind in self._windows:
            EVENT_LOOP_BLOCK_SECONDS.labels(kind).set_function(self._longest(kind))

    async def run(self) -> None:
        """For ever."""
        turned = time.monotonic()
        while True:
            before = (time.monotonic(), time.thread_time(), waited_for_core_s())
            await asyncio.sleep(self._interval_s)
            now, cpu, waited = time.monotonic(), time.thread_time(), waited_for_core_s()
            late = now - before[0] - self._interval_s - (waited - before[2])
            self._note("busy", cpu - before[1])
            self._note("late", late)
            if now - turned > _WINDOW_S:
                turned = now
                for window in self._windows.values():
                    window[:] = [0.0, window[0]]

    def take(self, kind: str = "busy") -> float:
        """The longest block in seconds since it was last taken."""
        longest = max(self._windows[kind])
        self._windows[kind][:] = [0.0, 0.0]
        return longest

    def _note(self, kind: str, block_s: float) -> None:
        self._windows[kind][0] = max(self._windows[kind][0], block_s)

    def _longest(self, kind: str) -> Callable[[], float]:
        return lambda: max(self._windows[kind])


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
