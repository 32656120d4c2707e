"""Run a coroutine for a synchronous caller, also if an event loop is already running."""

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
