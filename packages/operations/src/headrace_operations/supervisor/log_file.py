"""A service's log: one file, rotated at a size, so that it stays bounded."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO

from headrace_runtime.private_files import owner_alone, private_folder

_LINE_BYTES_MAX = 65_536
_TAIL_LINES = 20
_PIPE_BYTES = 1 << 20


def wide(pipe: IO[bytes]) -> None:
    """Let a process say more before it has to wait for a reader that is stopped. Linux can, others need not."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class LogFile:
    """Copies a process's output to `path`; at `bytes_max` that becomes `path.1` and so on, `backups` of them.

    What a full disk does not take is left out and counted: the service that writes is never held up, and the first line
    that finds room again says how many are missing.
    """

    def __init__(self, path: Path, bytes_max: int, backups: int) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._backups = backups
        self._missing = 0
        self._cause = ""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines, to say why a process ended."""
        private_folder(path.parent)

    def follow(self, pipe: IO[bytes]) -> threading.Thread:
        """Copy in a thread of its own until the pipe's writers are gone."""
        thread = threading.Thread(target=self._copy, args=(pipe,), name=f"log-{self.path.stem}", daemon=True)
        thread.start()
        return thread

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            while line := pipe.readline(_LINE_BYTES_MAX):
                self.tail.append(line.decode("utf-8", "replace").rstrip())
                self.write(line)

    def write(self, line: bytes) -> None:
        """Append a line, behind a note about those that are missing. Never raises for a disk that refuses."""
        try:
            if self._missing:
                self._append(f"headrace: {self._missing} lines are missing here: {self._cause}\n".encode())
                self._missing = 0
            self._append(line)
        except OSError as error:
            self._missing += 1
            self._cause = f"disk: {(error.strerror or str(error)).lower()} on {self.path.parent}"

    def _append(self, line: bytes) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and size + len(line) > self._bytes_max:
            self._rotate()
            size = 0
        with open(self.path, "ab", buffering=0, opener=owner_alone) as file:
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)  # half a line is none
                raise

    def _rotate(self) -> None:
        for number in range(self._backups, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)
        if not self._backups:
            self.path.unlink(missing_ok=True)
