"""Workers as Ray actors. The cluster places them; each runs the gate's program on its machine as the registry would."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from headrace_registry.gate.gate import Gate, GateFailed, GateSession
from headrace_registry.gate_workers.dispatcher import WorkerLost, worker_names
from headrace_registry.settings import GateSettings
from headrace_runtime.errors import Unavailable
from headrace_schemas.programs.gate import Play, Tasks

_CONNECT_S = 20.0


class ProgramRunner:
    """Ray actor that runs the gate's program. The program ends with the actor, however that ends."""

    def __init__(self, settings: GateSettings, folder: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        if Path(folder).is_dir():
            os.chdir(folder)
        self._gate = Gate(settings)
        self._open = contextlib.AsyncExitStack()
        self._session: GateSession | None = None

    async def tasks(self) -> Tasks:
        """Start the program and return its tasks. Raises `GateFailed`."""
        self._session = await self._open.enter_async_context(self._gate.session())
        return self._session.tasks

    async def play(self, play: Play) -> float:
        """Return the score of a play. Raises `GateFailed`."""
        assert self._session is not None
        return await self._session.play(play.version, play.task, play.seed)


class RayGateWorker:
    """A `dispatcher.GateWorker` that calls a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def tasks(self) -> Tasks:
        tasks = await _answer(self._actor.tasks.remote())
        assert isinstance(tasks, Tasks)
        return tasks

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
        if host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    except (OSError, GetTimeoutError, RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise Unavailable(f"no Ray cluster at registry.gate.ray.address = {address}: {first}") from None


def start(settings: GateSettings) -> dict[str, RayGateWorker]:
    """Create the workers. Each is placed, and starts its program, when its tasks are first requested."""
    ray_settings = settings.ray
    program_settings = settings.model_copy(update={"ray": ray_settings.model_copy(update={"workers": 0})})
    environment = {name: os.environ[name] for name in settings.passed_on if name in os.environ}
    actor = ray.remote(ProgramRunner).options(  # type: ignore[attr-defined, unused-ignore]
        num_cpus=ray_settings.cpus, max_restarts=0, max_concurrency=settings.concurrency, scheduling_strategy="SPREAD"
    )
    return {
        name: RayGateWorker(actor.remote(program_settings, str(Path.cwd()), environment))
        for name in worker_names(ray_settings.workers, settings.concurrency)
    }
