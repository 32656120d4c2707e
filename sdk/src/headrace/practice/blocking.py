"""Runs a coroutine for a caller that does not await, also where an event loop runs already."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, on an event loop of its own: in this thread, or in another one while this has a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, thread_name_prefix="headrace-blocking") as thread:
        return thread.submit(context.run, asyncio.run, work).result()
