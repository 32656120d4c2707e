"""The agent's process. It ends when the demo ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence

from headrace_runtime.parent_death import bound_to_parent

_STOP_S_MAX = 60.0


@contextlib.asynccontextmanager
async def at_work(command: Sequence[str], environ: Mapping[str, str]) -> AsyncIterator[Process]:
    """The body may wait for it to end; at the body's end it is asked to finish what it has begun."""
    process = await asyncio.create_subprocess_exec(*bound_to_parent(command), env=environ)
    try:
        yield process
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), _STOP_S_MAX)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
