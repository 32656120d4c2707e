"""Observes by the pipe of `liveness` whether the event loop of another process still runs.

A stopped process and a blocked event loop send no heartbeats. In contrast to HTTP responses, heartbeats also arrive
under load. Only time in which the watcher itself runs counts as silence.
"""

from __future__ import annotations

import contextlib
import os

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
