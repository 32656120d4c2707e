"""Filter programs of services: they read events as lines, write results as lines, and do not use the bus.

A line is a word, a space, and JSON on the rest of it; `headrace_schemas.replay` says which words there are. Whoever
starts such a program writes and reads at the same time. It is started like a service (`headrace_runtime.main`), with
the same settings; its log goes to standard error.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import BinaryIO

_CHUNK_BYTES = 262_144


def line_of(word: str, value: bytes) -> bytes:
    return b"%s %s\n" % (word.encode(), value)


def parsed(line: bytes) -> tuple[str, bytes]:
    """Word and JSON. Raises `ValueError` for a line without a space."""
    word, sign, value = line.rstrip(b"\n").partition(b" ")
    if not sign:
        raise ValueError(f"a line without a space: {line[:40]!r}")
    return word.decode(), value


class Lines:
    """Standard input and output of a filter, unless told otherwise."""

    def __init__(self, source: BinaryIO | None = None, target: BinaryIO | None = None) -> None:
        self._source = source or sys.stdin.buffer
        self._target = target or sys.stdout.buffer

    async def read(self) -> AsyncIterator[tuple[str, bytes]]:
        """Word and JSON of each line, until the other side is done. Raises `ValueError` for a line without a space."""
        while chunk := await asyncio.to_thread(self._source.readlines, _CHUNK_BYTES):
            for line in chunk:
                yield parsed(line)
            self._target.flush()

    def write(self, word: str, value: bytes) -> None:
        """Blocks while the other side does not read."""
        self._target.write(line_of(word, value))

    def flush(self) -> None:
        self._target.flush()
