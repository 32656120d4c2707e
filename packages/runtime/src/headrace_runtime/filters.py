"""Line input and output of filter programs, which read events and write results as lines, without the bus.

A line consists of a word, a space and JSON (`headrace_schemas.programs.replay`). The caller of a filter must read and
write concurrently. A filter starts like a service (`headrace_runtime.main`), with the same settings, and logs to
standard error.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import BinaryIO

_CHUNK_BYTES = 262_144


def line_of(word: str, value: bytes) -> bytes:
    """Return the line with a word and JSON."""
    return b"%s %s\n" % (word.encode(), value)


def parse_line(line: bytes) -> tuple[str, bytes]:
    """Return the word and the JSON of a line. Raises `ValueError` for a line without a space."""
    word, space, value = line.rstrip(b"\n").partition(b" ")
    if not space:
        raise ValueError(f"line without a space: {line[:40]!r}")
    return word.decode(), value


class Lines:
    """Input and output of a filter, by default standard input and output."""

    def __init__(self, source: BinaryIO | None = None, target: BinaryIO | None = None) -> None:
        self._source = source or sys.stdin.buffer
        self._target = target or sys.stdout.buffer

    async def read(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield word and JSON of each line until the end of the input. Raises `ValueError` as `parse_line` does."""
        while chunk := await asyncio.to_thread(self._source.readlines, _CHUNK_BYTES):
            for line in chunk:
                yield parse_line(line)
            self._target.flush()

    def write(self, word: str, value: bytes) -> None:
        """Write a line. Blocks while the reader is slow."""
        self._target.write(line_of(word, value))

    def flush(self) -> None:
        self._target.flush()
