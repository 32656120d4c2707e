"""Runs a coroutine for a caller that does not await, also where an event loop runs already."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from headrace.practice.loop_thread import LoopThread

T = TypeVar("T")


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. All such work of a program is on one event loop, which a thread of its own runs: people's
    asyncio clients keep connections, and those are good on one loop alone. The caller's context is that of the work."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is _loop():  # who calls is such work itself, and its loop is not free while it waits
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
