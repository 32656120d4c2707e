"""Workers as Ray actors. The cluster places them; each runs the gate's program on its machine as the registry would."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from headrace_registry.gate import Gate, GateFailed, GateSession
from headrace_registry.gate_workers.dealing import WorkerLost, places
from headrace_registry.settings import GateSettings
from headrace_runtime.errors import Unavailable
from headrace_schemas.gate import Play, Tasks

_CONNECT_S = 20.0


class ProgramRunner:
    """The actor. Its program ends with it, however that ends."""

    def __init__(self, settings: GateSettings, folder: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        if Path(folder).is_dir():
            os.chdir(folder)
        self._gate = Gate(settings)
        self._open = contextlib.AsyncExitStack()
        self._session: GateSession | None = None

    async def tasks(self) -> Tasks:
        """Starts the program. Raises `GateFailed`."""
        self._session = await self._open.enter_async_context(self._gate.session())
        return self._session.tasks

    async def play(self, play: Play) -> float:
        """Raises `GateFailed`."""
        assert self._session is not None
        return await self._session.play(play.version, play.task, play.seed)


class RayGateWorker:
    """An actor, as `dealing.GateWorker` has it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def tasks(self) -> Tasks:
        found = await _answer(self._actor.tasks.remote())
        assert isinstance(found, Tasks)
        return found

    async def play(self, play: Play) -> float:
        return float(await _answer(self._actor.play.remote(play)))


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except RayActorError as error:
        raise WorkerLost(str(error).splitlines()[0]) from None
    except RayTaskError as error:
        if isinstance(error.cause, GateFailed):
            raise GateFailed(str(error.cause)) from None
        raise


def connect(address: str) -> None:
    """Join the cluster. Blocks. Raises `Unavailable`."""
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    except (OSError, GetTimeoutError, RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise Unavailable(f"no Ray cluster at registry.gate.ray.address = {address}: {first}") from None


def start(settings: GateSettings) -> dict[str, RayGateWorker]:
    """As many as are wanted. They are placed, and start their program, when they are asked for their tasks."""
    chosen = settings.ray
    alone = settings.model_copy(update={"ray": chosen.model_copy(update={"workers": 0})})
    handed = {name: os.environ[name] for name in settings.passed_on if name in os.environ}
    actor = ray.remote(ProgramRunner).options(  # type: ignore[attr-defined, unused-ignore]
        num_cpus=chosen.cpus, max_restarts=0, max_concurrency=settings.concurrency, scheduling_strategy="SPREAD"
    )
    return {
        name: RayGateWorker(actor.remote(alone, str(Path.cwd()), handed))
        for name in places(chosen.workers, settings.concurrency)
    }
