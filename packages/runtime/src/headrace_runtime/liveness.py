"""Shows the parent process that this one works: the event loop writes to the pipe `LIVENESS_FD` while it runs.

A supervisor kills what is silent for long and starts it again. The loop itself writes: a loop that is stuck has to be
silent. Long work belongs on threads, and on a machine with more to do than it can, or where a library keeps the
interpreter's lock, it can keep the loop waiting all the same. So work that advances in pieces calls `progress` after
each of them, from whichever thread: that is a sign of life as well, and a piece that never ends gives none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, MutableMapping

VARIABLE = "LIVENESS_FD"
INTERVAL_S = 0.5


class _Pipe:
    """The pipe of this process. There is one, as there is one standard output: work of any depth reports to it."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._written_s = 0.0

    def write(self) -> None:
        """Give a sign of life. A reader that is busy or gone stops nobody."""
        if self.descriptor is not None:
            self._written_s = time.monotonic()
            with contextlib.suppress(OSError):
                os.write(self.descriptor, b".")

    def progress(self) -> None:
        """Give one unless that was done just now."""
        if self.descriptor is not None and time.monotonic() - self._written_s >= INTERVAL_S / 2:
            self.write()


_PIPE = _Pipe()


def progress() -> None:
    """Report that long work has finished a piece: a pass, a layer, some megabytes. Any thread may call it, as often as
    it likes."""
    _PIPE.progress()


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
    _PIPE.descriptor = pipe
    task = asyncio.create_task(_beat()) if pipe is not None else None
    try:
        yield
    finally:
        _PIPE.descriptor = None
        if task is not None:
            task.cancel()


async def _beat() -> None:
    while True:
        _PIPE.write()
        await asyncio.sleep(INTERVAL_S)
