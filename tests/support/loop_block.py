"""Measurement of the time for which a test blocks its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace_runtime.process.event_loop import LoopWatch


@dataclass(slots=True)
class Block:
    """Longest block of the loop in CPU seconds, which other load does not change. `busy_s` is set at the end of the
    block.
    """

    busy_s: float = 0.0


@contextlib.asynccontextmanager
async def blocked() -> AsyncIterator[Block]:
    """Measure the longest time for which code in the `async with` body keeps the loop busy without a pause.

    Garbage collection is off meanwhile: a collection that scans the objects of thousands of tests takes 100 ms.
    """
    watch = LoopWatch(interval_s=0.005)
    running = asyncio.create_task(watch.run())
    block = Block()
    gc.disable()
    try:
        await asyncio.sleep(0)  # so that its first look is before the work
        yield block
        await asyncio.sleep(0.02)  # so that its last look is after it
    finally:
        running.cancel()
        block.busy_s = watch.take()
        gc.enable()
