"""Watches whether the event loop of another process still runs, by the pipe of `liveness`.

A stopped process, and a loop that is stuck, write nothing. Load does not silence a loop that turns, as it can an HTTP
server. What is counted is silence that was watched: while the watcher itself is stopped, nobody grows older.
"""

from __future__ import annotations

import contextlib
import os

_READ_BYTES = 4096
_LOOK_S_MAX = 4.0
"""More than this between two looks is the watcher's own absence (SIGSTOP, a sleeping machine, a frozen container)."""


class LivenessWatch:
    """`open` it before each start, `started` after it, and `look` often."""

    def __init__(self) -> None:
        self.reading: int | None = None
        """Our end of the pipe, None before the first `open` and after `close`."""
        self._writing: int | None = None
        self._looked_s = 0.0
        self.silent_s = 0.0
        """For how long it was watched without a sign of life."""
        self.beats = False
        """Whether this life has ever written; who does not know the pipe answers by HTTP only."""
        self.ended = False
        """Whether nobody has the other end any more: the process ends, or closed what it did not know."""

    def open(self) -> int:
        """The descriptor to hand over, named in the environment by `liveness.VARIABLE`."""
        self.close()
        self.reading, self._writing = os.pipe()
        os.set_blocking(self.reading, False)
        return self._writing

    def started(self, now_s: float) -> None:
        """The process has the other end; from here on silence counts."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None
        self._looked_s, self.silent_s, self.beats, self.ended = now_s, 0.0, False, False

    def look(self, now_s: float) -> None:
        """Take what was written, and the time that has passed."""
        self.silent_s += min(now_s - self._looked_s, _LOOK_S_MAX)
        self._looked_s = now_s
        if self._beaten():
            self.beats = True
            self.sign()

    def sign(self) -> None:
        """It has shown that it lives, here or by an answer."""
        self.silent_s = 0.0

    def close(self) -> None:
        for end in (self.reading, self._writing):
            if end is not None:
                os.close(end)
        self.reading = self._writing = None

    def _beaten(self) -> bool:
        found = False
        if self.reading is not None:
            with contextlib.suppress(BlockingIOError):
                while os.read(self.reading, _READ_BYTES):
                    found = True
                self.ended = True
        return found
