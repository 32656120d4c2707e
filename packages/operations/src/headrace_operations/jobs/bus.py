"""The bus of a job: the configured one, that of a running `headrace up`, or an embedded broker while the job runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace_operations.errors import NotRunning
from headrace_operations.jobs.job import PreparedJob
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.plan import installed
from headrace_operations.supervisor.state import read

_BROKER_START_S_MAX = 600.0
"""Maximum time until the embedded broker answers. It is long, because no user waits for a job."""


@contextlib.asynccontextmanager
async def open_bus(prepared: PreparedJob) -> AsyncIterator[str]:
    """Yield the address of the bus, and set it for the programs of the job.

    Raises:
        UsageError: a setting is invalid.
        StartFailed: the embedded broker did not start.
    """
    address = prepared.job.bus or str(prepared.overrides.get("bus.address") or "") or _running_bus(prepared)
    if address:
        prepared.overrides.set("bus.address", address)
        yield address
        return
    brokers = [name for name, info in installed().items() if info.is_bus]
    # The broker's file is in the data directory, so `headrace up` and the job see each other's topics.
    supervisor = await asyncio.to_thread(
        Supervisor, prepared.data_dir, only=brokers, auto_ports=True, environ=prepared.overrides.environ
    )
    try:
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_up, _BROKER_START_S_MAX)
        prepared.overrides.set("bus.address", supervisor.plan.bus)
        yield supervisor.plan.bus
    finally:
        await asyncio.to_thread(supervisor.stop)


def _running_bus(prepared: PreparedJob) -> str | None:
    try:
        return read(prepared.data_dir).bus
    except NotRunning:
        return None
