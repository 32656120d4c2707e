"""Standard input on an event loop, with the registry's requests to a gate program (docs/gate.md)."""

from __future__ import annotations

import asyncio
import sys


async def standard_input() -> asyncio.StreamReader:
    """Return a reader of standard input. The caller must be its only reader."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader
