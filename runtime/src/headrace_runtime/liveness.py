"""Shows the parent process that this one works: the event loop writes to the pipe `LIVENESS_FD` while it runs.

A supervisor kills what is silent for long and starts it again. The loop itself writes, no thread: a loop that is stuck
has to be silent. Long work belongs on threads, where it does not silence it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, MutableMapping

VARIABLE = "LIVENESS_FD"
INTERVAL_S = 0.5


def handed_over(environ: MutableMapping[str, str]) -> int | None:
    """The pipe that this process was started with, None without one. Its own children neither see nor have it."""
    text = environ.pop(VARIABLE, "")
    if not text.isdecimal():
        return None
    try:
        os.set_inheritable(int(text), False)
        os.set_blocking(int(text), False)
    except OSError:  # closed on the way here, so it was not meant for us
        return None
    return int(text)


@contextlib.asynccontextmanager
async def beating(pipe: int | None) -> AsyncIterator[None]:
    """While the body runs, its loop shows that it turns."""
    task = asyncio.create_task(_beat(pipe)) if pipe is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _beat(pipe: int) -> None:
    while True:
        with contextlib.suppress(OSError):  # full: the reader is busy; broken: it is gone, and then we end with it
            os.write(pipe, b".")
        await asyncio.sleep(INTERVAL_S)
