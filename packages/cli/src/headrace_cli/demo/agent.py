"""Process of the agent, which ends with the demo."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence

from headrace_runtime.process.parent_death import bound_to_parent

_STOP_S_MAX = 60.0


@contextlib.asynccontextmanager
async def running_agent(command: Sequence[str], environ: Mapping[str, str]) -> AsyncIterator[Process]:
    """Run the agent during the block, which may wait for its end.

    After the block it gets SIGTERM and time to finish.
    """
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
