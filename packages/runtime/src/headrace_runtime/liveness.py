"""Heartbeats to the parent process: the event loop writes to the pipe `LIVENESS_FD` while it runs.

A supervisor kills and restarts a process that sends no heartbeat for long. The event loop itself sends them, so a
blocked loop sends none. Long work runs in threads, but on an overloaded machine, or if a library keeps the interpreter
lock, it can delay the loop nevertheless. So long work calls `progress` after each of its parts, from any thread, which
sends a heartbeat, too. A part that never ends sends none.
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
    """The pipe of this process. It is global like standard output, because work at any depth reports progress."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._written_s = 0.0

    def write(self) -> None:
        """Send a heartbeat. A busy or missing reader is ignored."""
        if self.descriptor is not None:
            self._written_s = time.monotonic()
            with contextlib.suppress(OSError):
                os.write(self.descriptor, b".")

    def progress(self) -> None:
        """Send a heartbeat unless the last one is recent."""
        if self.descriptor is not None and time.monotonic() - self._written_s >= INTERVAL_S / 2:
            self.write()


_PIPE = _Pipe()


def progress() -> None:
    """Report that long work has finished a part: a pass, a layer, some megabytes.

    The call is cheap, and any thread may make it.
    """
    _PIPE.progress()


def take_inherited_pipe(environ: MutableMapping[str, str]) -> int | None:
    """Return the pipe that this process inherited, or None. Its own child processes do not inherit it."""
    text = environ.pop(VARIABLE, "")
    if not text.isdecimal():
        return None
    try:
        os.set_inheritable(int(text), False)
        os.set_blocking(int(text), False)
    except OSError:  # a program in between has closed it, so the variable is not for this process
        return None
    return int(text)


@contextlib.asynccontextmanager
async def send_heartbeats(pipe: int | None) -> AsyncIterator[None]:
    """Send heartbeats from the event loop to `pipe` while the body runs."""
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
