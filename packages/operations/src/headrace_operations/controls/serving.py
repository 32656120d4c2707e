"""A gateway and a replica on a separate bus, with which the gate program plays the trained versions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.producing import Outgoing, producing
from headrace.topics import Range, connected
from headrace_operations.supervisor import Supervisor
from headrace_schemas import Checkpoint, Replica, Routing, ServedVersion

_SERVICES = ("broker", "gateway", "inference")
_LOADED_S_MAX = 600.0
_POLL_S = 0.3


class VersionServer:
    """Gateway and replica that serve one trained version and its base at a time. `serving` creates it.

    So memory need only be as large as for a live swap of versions.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._bus = supervisor.plan.bus
        self._revision = 0
        self.base_url = f"{supervisor.url('gateway')}/v1"

    async def serve(self, base: Checkpoint, checkpoint: Checkpoint) -> None:
        """Serve a version and its base in place of those before, and return when the replica has loaded the version.

        Raises:
            HeadraceError: the replica could not load the version, or not in time.
        """
        self._revision += 1
        served = {
            entry.version: ServedVersion(version=entry.version, manifest=entry.manifest) for entry in (base, checkpoint)
        }
        routing = Routing(
            time=datetime.now(UTC),
            model=checkpoint.model,
            revision=self._revision,
            aliases={"champion": checkpoint.version},
            serve=tuple(served.values()),
        )
        async with producing(self._bus, "headrace-controls") as producer:
            await producer.send([Outgoing.of(routing, "headrace/controls")])
        deadline = time.monotonic() + _LOADED_S_MAX
        while not await self._ready(checkpoint.version):
            if time.monotonic() > deadline:
                raise HeadraceError(f"{checkpoint.version} was not loaded within {_LOADED_S_MAX:g} s")
            await asyncio.sleep(_POLL_S)

    async def _ready(self, version: str) -> bool:
        """Return whether the last heartbeat reports the version as ready."""
        last: Replica | None = None
        async with connected(self._bus) as topics:
            async for entry in topics.read(Range(Replica.topic)):
                last = entry.event if isinstance(entry.event, Replica) else last
        state = next((entry for entry in last.versions if entry.version == version), None) if last else None
        if state is not None and state.state == "failed":
            raise HeadraceError(f"{version} could not be loaded: {state.error}")
        return state is not None and state.state == "ready"


@contextlib.asynccontextmanager
async def serving(
    data_dir: Path, config: Path | None, settings: Mapping[str, object], environ: Mapping[str, str]
) -> AsyncIterator[VersionServer]:
    """Start broker, gateway and replica on free ports, and stop them at the end of the block.

    Args:
        data_dir: the scratch folder of the services.
        config: the settings file, or None.
        settings: settings by dotted name, which override the file.
        environ: environment of the services.
    """
    overrides = {"gateway.port": 0, "inference.port": 0, "broker.port": 0, "broker.kafka_port": 0, "bus.replication": 1}
    supervisor = await asyncio.to_thread(
        Supervisor,
        data_dir,
        config=config,
        settings={**settings, **overrides},
        only=_SERVICES,
        auto_ports=True,
        environ=environ,
    )
    try:
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_up)
        yield VersionServer(supervisor)
    finally:
        await asyncio.to_thread(supervisor.stop)
