"""The bus of a job: the one that is named, that of what runs here, or the embedded broker while the job runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace_operations.errors import NotRunning
from headrace_operations.jobs.job import PreparedJob
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.plan import installed
from headrace_operations.supervisor.state import read

_UP_S_MAX = 600.0
"""How long the embedded broker may take to answer; nobody waits for a job."""


@contextlib.asynccontextmanager
async def bus_of(prepared: PreparedJob) -> AsyncIterator[str]:
    """Its address, which the programs of the job are told, too. Raises `UsageError`, `StartFailed`."""
    address = prepared.job.bus or str(prepared.overrides.get("bus.address") or "") or _of_what_runs(prepared)
    if address:
        prepared.overrides.set("bus.address", address)
        yield address
        return
    brokers = [name for name, info in installed().items() if info.is_bus]
    # Its file is in the data directory, so what a job wrote is there for `headrace up`, and the other way round.
    supervisor = await asyncio.to_thread(
        Supervisor, prepared.data_dir, only=brokers, auto_ports=True, environ=prepared.overrides.environ
    )
    try:
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_up, _UP_S_MAX)
        prepared.overrides.set("bus.address", supervisor.plan.bus)
        yield supervisor.plan.bus
    finally:
        await asyncio.to_thread(supervisor.stop)


def _of_what_runs(prepared: PreparedJob) -> str | None:
    try:
        return read(prepared.data_dir).bus
    except NotRunning:
        return None
