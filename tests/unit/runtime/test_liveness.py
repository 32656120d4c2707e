"""A service's event loop shows that it turns, and is silent when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
import time

import pytest

from headrace_runtime.process import liveness
from headrace_runtime.process.liveness import LivenessWatch


def test_the_loop_writes_while_it_turns_and_not_while_it_is_stuck() -> None:
    reading, writing = os.pipe()
    pipe = liveness.take_inherited_pipe(environ := {liveness.VARIABLE: str(writing), "OTHER": "1"})
    assert (pipe, environ) == (writing, {"OTHER": "1"})
    assert not os.get_inheritable(writing)

    async def body() -> None:
        async with liveness.send_heartbeats(pipe):
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


def test_progress_of_a_thread_is_a_sign_of_life_while_the_loop_waits_and_a_hang_gives_none() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    watch = LivenessWatch()
    watch.reading = reading
    pipe = liveness.take_inherited_pipe({liveness.VARIABLE: str(writing)})
    pieces, hang = threading.Semaphore(0), threading.Event()

    def work() -> None:
        while pieces.acquire() and not hang.is_set():
            liveness.progress()

    async def body() -> None:
        async with liveness.send_heartbeats(pipe):
            await asyncio.sleep(0)
            thread = threading.Thread(target=work)
            thread.start()
            watch.started(0.0)
            watch.poll(0.0)
            for second in range(1, 4):  # the loop is stuck in here, and pieces are finished beside it
                time.sleep(liveness.INTERVAL_S)  # noqa: ASYNC251 (that is how it is stuck)
                pieces.release()
                assert select.select([reading], [], [], 10)[0], "no sign of life of the thread"
                watch.poll(float(second))
                assert watch.silent_s == 0.0
            for second in range(4, 44):  # both are stuck
                watch.poll(float(second))
            assert watch.silent_s == 40.0
            hang.set()
            pieces.release()
            thread.join()

    asyncio.run(body())
    liveness.progress()
    os.close(writing)
    watch.close()


def test_a_reader_that_is_away_stops_nobody() -> None:
    reading, writing = os.pipe()
    pipe = liveness.take_inherited_pipe({liveness.VARIABLE: str(writing)})
    assert pipe is not None
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"." * 4096):
            pass

    async def body() -> None:
        async with liveness.send_heartbeats(pipe):
            await asyncio.sleep(0.01)
        os.close(reading)
        async with liveness.send_heartbeats(pipe):
            await asyncio.sleep(0.01)

    asyncio.run(body())
    os.close(writing)


def test_without_a_pipe_nothing_is_written() -> None:
    assert liveness.take_inherited_pipe({}) is None
    assert liveness.take_inherited_pipe({liveness.VARIABLE: "nonsense"}) is None
    assert liveness.take_inherited_pipe({liveness.VARIABLE: "987654"}) is None, "closed on the way"
