"""A service's event loop shows that it turns, and is silent when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

import pytest

from headrace_runtime import liveness


def test_the_loop_writes_while_it_turns_and_not_while_it_is_stuck() -> None:
    reading, writing = os.pipe()
    pipe = liveness.handed_over(environ := {liveness.VARIABLE: str(writing), "OTHER": "1"})
    assert (pipe, environ) == (writing, {"OTHER": "1"})
    assert not os.get_inheritable(writing)

    async def body() -> None:
        async with liveness.beating(pipe):
            await asyncio.sleep(0)
            assert os.read(reading, 100) == b"."
            os.set_blocking(reading, False)
            stuck = subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=True)  # noqa: ASYNC221
            assert stuck.returncode == 0
            with pytest.raises(BlockingIOError):
                os.read(reading, 100)
            os.set_blocking(reading, True)
            assert await asyncio.to_thread(os.read, reading, 100), "it turns again"

    asyncio.run(body())
    os.close(writing)
    os.close(reading)


def test_a_reader_that_is_away_stops_nobody() -> None:
    reading, writing = os.pipe()
    pipe = liveness.handed_over({liveness.VARIABLE: str(writing)})
    assert pipe is not None
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"." * 4096):
            pass

    async def body() -> None:
        async with liveness.beating(pipe):
            await asyncio.sleep(0.01)
        os.close(reading)
        async with liveness.beating(pipe):
            await asyncio.sleep(0.01)

    asyncio.run(body())
    os.close(writing)


def test_without_a_pipe_nothing_is_written() -> None:
    assert liveness.handed_over({}) is None
    assert liveness.handed_over({liveness.VARIABLE: "nonsense"}) is None
    assert liveness.handed_over({liveness.VARIABLE: "987654"}) is None, "closed on the way"
