"""Runs a gateway and a replica on a separate bus, so that the gate's program can play the trained versions."""

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
_LOOK_S = 0.3


class Stage:
    """`serving` makes one. One version beside its base at a time: memory is that of the live service's swap."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._bus = supervisor.plan.bus
        self._revision = 0
        self.base_url = f"{supervisor.url('gateway')}/v1"

    async def show(self, base: Checkpoint, one: Checkpoint) -> None:
        """Returns once a replica has `one` ready; an adapter needs its base beside it.

        Raises `HeadraceError` with what the replica says against it.
        """
        self._revision += 1
        chosen = {shown.version: ServedVersion(version=shown.version, manifest=shown.manifest) for shown in (base, one)}
        routing = Routing(
            time=datetime.now(UTC),
            model=one.model,
            revision=self._revision,
            aliases={"champion": one.version},
            serve=tuple(chosen.values()),
        )
        async with producing(self._bus, "headrace-controls") as producer:
            await producer.send([Outgoing.of(routing, "headrace/controls")])
        until = time.monotonic() + _LOADED_S_MAX
        while not await self._ready(one.version):
            if time.monotonic() > until:
                raise HeadraceError(f"{one.version} was not loaded within {_LOADED_S_MAX:g} s")
            await asyncio.sleep(_LOOK_S)

    async def _ready(self, version: str) -> bool:
        """By the last heartbeat."""
        last: Replica | None = None
        async with connected(self._bus) as topics:
            async for entry in topics.read(Range(Replica.topic)):
                last = entry.event if isinstance(entry.event, Replica) else last
        state = next((one for one in last.versions if one.version == version), None) if last else None
        if state is not None and state.state == "failed":
            raise HeadraceError(f"{version} could not be loaded: {state.error}")
        return state is not None and state.state == "ready"


@contextlib.asynccontextmanager
async def serving(
    data_dir: Path, config: Path | None, settings: Mapping[str, object], environ: Mapping[str, str]
) -> AsyncIterator[Stage]:
    """Everything is stopped when it is left."""
    own = {"gateway.port": 0, "inference.port": 0, "broker.port": 0, "broker.kafka_port": 0, "bus.replication": 1}
    supervisor = await asyncio.to_thread(
        Supervisor,
        data_dir,
        config=config,
        settings={**settings, **own},
        only=_SERVICES,
        auto_ports=True,
        environ=environ,
    )
    try:
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_up)
        yield Stage(supervisor)
    finally:
        await asyncio.to_thread(supervisor.stop)
