"""Worker threads for work of unbounded size: parsing, chat templates, tokenization, assembling answers.

Python's threads share one interpreter lock. A worker thread keeps the event loop responsive as long as no single
library call holds that lock for long. `headrace_runtime.kafka.wire` bounds the calls that would, such as JSON parsing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")
_LARGE_BYTES = 262_144
"""Work on more bytes runs in a separate thread, so that it does not delay smaller work."""
_INLINE_BYTES_MAX = 32_768
"""Work on more bytes would delay the event loop noticeably: parsing may take half a microsecond per byte."""


async def run_off_loop(size_bytes: int, work: Callable[[], T]) -> T:
    """Run `work` and return its result, in a thread of the default executor if it processes many bytes.

    Args:
        size_bytes: the approximate number of bytes that `work` processes.
        work: the function to run.
    """
    return await asyncio.to_thread(work) if size_bytes > _INLINE_BYTES_MAX else work()


class WorkerThreads:
    """Worker threads of one service. The queue is not bounded; callers must bound the number of waiting requests."""

    def __init__(self, threads: int, inline_bytes: int = 16_384) -> None:
        """Create the pool.

        Args:
            threads: the number of threads for small work. Large work has one thread of its own.
            inline_bytes: work on at most so many bytes runs in the event loop, because a thread would cost more.
        """
        self._inline_bytes = inline_bytes
        self._small = ThreadPoolExecutor(threads, "worker")
        self._large = ThreadPoolExecutor(1, "worker-large")

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Run `work`, which processes about `size_bytes`, and return its result."""
        if size_bytes <= self._inline_bytes:
            return work()
        pool = self._large if size_bytes > _LARGE_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, work)

    def close(self) -> None:
        """Cancel waiting work. Running work continues to its end."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)
