"""Coroutines for callers that do not await."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from headrace.practice.blocking import blocking

WHERE: ContextVar[str] = ContextVar("where", default="nowhere")


async def here() -> tuple[asyncio.AbstractEventLoop, str, str]:
    await asyncio.sleep(0)
    return asyncio.get_running_loop(), threading.current_thread().name, WHERE.get()


def test_all_work_is_on_one_loop_in_the_callers_context() -> None:
    token = WHERE.set("here")
    try:
        first, second = blocking(here()), blocking(here())
    finally:
        WHERE.reset(token)
    assert first[0] is second[0]
    assert first[2] == "here"
    assert blocking(here())[2] == "nowhere"


async def test_a_program_with_a_loop_may_block() -> None:
    assert blocking(here())[0] is not asyncio.get_running_loop()


def test_work_that_blocks_itself_does_not_wait_for_itself() -> None:
    async def nested() -> asyncio.AbstractEventLoop:
        return blocking(here())[0]

    async def in_a_thread() -> asyncio.AbstractEventLoop:
        return (await asyncio.to_thread(lambda: blocking(here())))[0]

    loop = blocking(here())[0]
    assert blocking(nested()) is not loop
    assert blocking(in_a_thread()) is loop


def test_what_it_raises_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("as it should")

    with pytest.raises(ValueError, match="as it should"):
        blocking(fails())
