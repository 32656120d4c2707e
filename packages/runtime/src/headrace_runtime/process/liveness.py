"""Heartbeats to the parent process: the event loop writes to the pipe `LIVENESS_FD` while it runs; the parent watches.

A supervisor kills and restarts a process that sends no heartbeat for long. The event loop itself sends them, so a
blocked loop sends none. Long work runs in threads, but on an overloaded machine, or if a library keeps the interpreter
lock, it can delay the loop nevertheless. So long work calls `progress` after each of its parts, from any thread, which
sends a heartbeat, too. A part that never ends sends none.

In contrast to HTTP responses, heartbeats also arrive under load. Only time in which the watcher itself runs counts as
silence.
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


_READ_BYTES = 4096
_POLL_S_MAX = 4.0
"""Maximum time between two polls that counts as silence. A longer time means that the watcher itself was stopped
(SIGSTOP, a sleeping machine, a frozen container)."""


class LivenessWatch:
    """Watch of one process. Call `open` before each start of the process, `started` after it, and `poll` often."""

    def __init__(self) -> None:
        self.reading: int | None = None
        """The reading end of the pipe, or None before the first `open` and after `close`."""
        self._writing: int | None = None
        self._polled_s = 0.0
        self.silent_s = 0.0
        """Observed seconds since the last heartbeat."""
        self.beats = False
        """Whether the process has sent a heartbeat since its start. Programs without `liveness` never send one."""
        self.ended = False
        """Whether the process has closed the pipe, because it ends or does not use it."""

    def open(self) -> int:
        """Open the pipe, and return the descriptor that the process must inherit as `liveness.VARIABLE`."""
        self.close()
        self.reading, self._writing = os.pipe()
        os.set_blocking(self.reading, False)
        return self._writing

    def started(self, now_s: float) -> None:
        """Begin to count silence, after the process has inherited the descriptor."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None
        self._polled_s, self.silent_s, self.beats, self.ended = now_s, 0.0, False, False

    def poll(self, now_s: float) -> None:
        """Read heartbeats and count the time since the last poll."""
        self.silent_s += min(now_s - self._polled_s, _POLL_S_MAX)
        self._polled_s = now_s
        if self._read_heartbeats():
            self.beats = True
            self.note_sign_of_life()

    def note_sign_of_life(self) -> None:
        """Reset the silence after a heartbeat or an HTTP response."""
        self.silent_s = 0.0

    def close(self) -> None:
        for end in (self.reading, self._writing):
            if end is not None:
                os.close(end)
        self.reading = self._writing = None

    def _read_heartbeats(self) -> bool:
        """Empty the pipe, and return whether it contained heartbeats."""
        has_beaten = False
        if self.reading is not None:
            with contextlib.suppress(BlockingIOError):
                while os.read(self.reading, _READ_BYTES):
                    has_beaten = True
                self.ended = True
        return has_beaten
