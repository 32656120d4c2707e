"""Log of a service: one file, rotated by size, so that its disk use is bounded."""

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

from headrace_runtime.storage.files import owner_alone, private_folder

_LINE_BYTES_MAX = 65_536
_TAIL_LINES = 20
_PIPE_BYTES = 1 << 20


def enlarge_pipe(pipe: IO[bytes]) -> None:
    """Enlarge the buffer of a pipe (Linux only), so that the service can write more while the supervisor is
    suspended."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class LogFile:
    """Copies the output of a process to a file that is rotated at `bytes_max`, with `backups` older files.

    Lines that do not fit on a full disk are counted and left out, so that the service is never blocked. The first line
    after that is preceded by their number.
    """

    def __init__(self, path: Path, bytes_max: int, backups: int) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._backups = backups
        self._lost_lines = 0
        self._cause = ""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines, to report why the process ended."""
        private_folder(path.parent)

    def follow(self, pipe: IO[bytes]) -> threading.Thread:
        """Copy the pipe in a separate thread until its writers close it."""
        thread = threading.Thread(target=self._copy, args=(pipe,), name=f"log-{self.path.stem}", daemon=True)
        thread.start()
        return thread

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            while line := pipe.readline(_LINE_BYTES_MAX):
                self.tail.append(line.decode("utf-8", "replace").rstrip())
                self.write(line)

    def write(self, line: bytes) -> None:
        """Append a line, after a note about lost lines. Errors of the disk are not raised."""
        try:
            if self._lost_lines:
                self._append(f"headrace: {self._lost_lines} lines were lost here: {self._cause}\n".encode())
                self._lost_lines = 0
            self._append(line)
        except OSError as error:
            self._lost_lines += 1
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
                file.truncate(size)  # remove the partial line
                raise

    def _rotate(self) -> None:
        for number in range(self._backups, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)
        if not self._backups:
            self.path.unlink(missing_ok=True)
