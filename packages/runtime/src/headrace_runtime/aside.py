"""Runs work whose length depends on the caller in threads: parsing, templates, tokenization, assembling answers.

Python's threads share one interpreter, so a thread helps as long as no single call of a library keeps the interpreter's
lock for long. What would (parsing JSON, above all) is bounded by `headrace_runtime.json_bounds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")
_LARGE_BYTES = 262_144
"""Work on more than this waits for a thread of its own, so that it does not hold up what is quick."""
_INLINE_BYTES_MAX = 32_768
"""Work on more than this is felt by everything else in the event loop: to parse a byte may cost half a microsecond."""


async def beside_loop(size_bytes: int, work: Callable[[], T]) -> T:
    """Return what `work` on about so many bytes returns; work on many is done in a thread of the event loop's own."""
    return await asyncio.to_thread(work) if size_bytes > _INLINE_BYTES_MAX else work()


class Aside:
    """Threads for one service. `inline_bytes`: work on no more than this is done at once, as a thread would cost more.

    Nothing is bounded here but the threads: how many requests wait is the business of whoever lets them in.
    """

    def __init__(self, threads: int, inline_bytes: int = 16_384) -> None:
        self._inline_bytes = inline_bytes
        self._quick = ThreadPoolExecutor(threads, "aside")
        self._slow = ThreadPoolExecutor(1, "aside-large")

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises. `size_bytes` is how much it has to work on, roughly."""
        if size_bytes <= self._inline_bytes:
            return work()
        pool = self._slow if size_bytes > _LARGE_BYTES else self._quick
        return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, work)

    def close(self) -> None:
        """What has begun is finished, what waits is dropped."""
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)
