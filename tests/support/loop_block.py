"""Measures in a test how long its event loop was kept from serving others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace_runtime.process.event_loop import LoopWatch


@dataclass(slots=True)
class Block:
    """`busy_s` is set at the end of the body: CPU time of the loop's thread, which a loaded machine does not change."""

    busy_s: float = 0.0


@contextlib.asynccontextmanager
async def blocked() -> AsyncIterator[Block]:
    """The longest time that the body's work kept the loop busy in one go.

    No garbage is collected meanwhile: a collection that walks the objects of thousands of tests takes 100 ms.
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
