"""`blocking` runs coroutines for synchronous callers."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from headrace.blocking import blocking

WHERE: ContextVar[str] = ContextVar("where", default="nowhere")


async def loop_thread_and_context() -> tuple[asyncio.AbstractEventLoop, str, str]:
    await asyncio.sleep(0)
    return asyncio.get_running_loop(), threading.current_thread().name, WHERE.get()


def test_blocking_runs_all_coroutines_on_one_loop_in_the_callers_context() -> None:
    token = WHERE.set("here")
    try:
        first, second = blocking(loop_thread_and_context()), blocking(loop_thread_and_context())
    finally:
        WHERE.reset(token)
    assert first[0] is second[0]
    assert first[2] == "here"
    assert blocking(loop_thread_and_context())[2] == "nowhere"


async def test_blocking_works_while_a_loop_is_running() -> None:
    assert blocking(loop_thread_and_context())[0] is not asyncio.get_running_loop()


def test_nested_blocking_does_not_deadlock() -> None:
    async def nested() -> asyncio.AbstractEventLoop:
        return blocking(loop_thread_and_context())[0]

    async def in_a_thread() -> asyncio.AbstractEventLoop:
        return (await asyncio.to_thread(lambda: blocking(loop_thread_and_context())))[0]

    loop = blocking(loop_thread_and_context())[0]
    assert blocking(nested()) is not loop
    assert blocking(in_a_thread()) is loop


def test_blocking_raises_the_error_of_the_coroutine() -> None:
    async def fails() -> None:
        raise ValueError("as it should")

    with pytest.raises(ValueError, match="as it should"):
        blocking(fails())
