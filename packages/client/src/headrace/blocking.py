"""Event loops in background threads, by which synchronous callers can run coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_END_S = 30.0


class LoopThread:
    """Event loop in a thread of its own, which runs until `close` or the end of the program.

    Args:
        workers: number of threads for blocking functions; by default asyncio's own number.
    """

    def __init__(self, name: str, workers: int | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        if workers is not None:
            self.loop.set_default_executor(ThreadPoolExecutor(workers, thread_name_prefix=name))
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result. Must not be called on the loop itself."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """Stop the event loop and wait for its thread. Unfinished coroutines are abandoned; threads of blocking
        functions end when their functions return."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_END_S)
        if not self.loop.is_running():
            self.loop.close()


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result.

    All such coroutines of a program share one event loop in a background thread, because asyncio clients keep
    connections that are valid on one loop only. The coroutine runs in the caller's context.
    """
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is _loop():  # the caller itself runs on the shared loop, which is blocked while it waits
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1, thread_name_prefix="headrace-blocking") as thread:
            return thread.submit(context.run, asyncio.run, work).result()
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return LoopThread("headrace-blocking").loop
