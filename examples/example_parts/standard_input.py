"""Standard input on an event loop: what the registry asks a gate's program for (docs/gate.md)."""

from __future__ import annotations

import asyncio
import sys


async def standard_input() -> asyncio.StreamReader:
    """Its lines as they come. Nobody else may read it."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader
