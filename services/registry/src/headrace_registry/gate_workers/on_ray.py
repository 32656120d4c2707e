"""Distribution of plays among workers, which are Ray actors. The Ray cluster chooses their machines. Each worker runs
the gate's program on its machine in the same way as the registry would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from headrace_registry.gate.gate import Gate, GateFailed, GateSession
from headrace_registry.settings import CPUS_OF_COPY, GateSettings
from headrace_runtime.errors import HeadraceError, Unavailable
from headrace_runtime.process.logs import get_logger
from headrace_schemas.programs import Play, Tasks

log = get_logger(__name__)
_CONNECT_S = 20.0


class WorkerLost(HeadraceError):
    """Raised if a worker has died, perhaps with its machine.

    Its program did not cause this, so other workers can take over its plays.
    """


class GateWorker(Protocol):
    """Running copy of the gate's program.

    Each method may raise `WorkerLost`, and `GateFailed` if the program failed.
    """

    async def tasks(self) -> Tasks: ...

    async def play(self, play: Play) -> float: ...


class PlayDispatcher:
    """Sends each play to the worker with the fewest plays in progress.

    If a worker is lost, its plays are sent to other workers, because version, task and seed describe a play completely.
    """

    def __init__(self, workers: Mapping[str, GateWorker]) -> None:
        self._workers = dict(workers)
        self._playing = dict.fromkeys(workers, 0)

    async def tasks(self) -> Tasks:
        """Wait until all workers have started, and return their tasks, which must be the same for all workers.

        Raises:
            GateFailed: the workers offer different tasks, or a program failed.
            WorkerLost: a worker does not exist any more.
        """
        task_lists = await asyncio.gather(*(worker.tasks() for worker in self._workers.values()))
        return _require_equal_tasks(dict(zip(self._workers, task_lists, strict=True)))

    async def play(self, play: Play) -> float:
        """Let a worker play, and return the score. Raises `GateFailed`, also if all workers are lost."""
        while self._workers:
            name = min(self._workers, key=lambda worker_name: self._playing[worker_name])
            self._playing[name] += 1
            try:
                return await self._workers[name].play(play)
            except WorkerLost as error:
                if self._workers.pop(name, None) is not None:
                    log.warning("gate_worker_lost", worker=name, left=len(self._workers), error=str(error))
            finally:
                self._playing[name] -= 1
        raise GateFailed("every worker of the gate's program is lost")


def _require_equal_tasks(tasks_by_worker: Mapping[str, Tasks]) -> Tasks:
    first, *rest = tasks_by_worker
    for worker in rest:
        if tasks_by_worker[worker] != tasks_by_worker[first]:
            raise GateFailed(f"workers {first} and {worker} name different tasks; give their machines the same files")
    return tasks_by_worker[first]


def worker_names(workers: int, concurrency: int) -> Sequence[str]:
    """Return the names of the workers. There are not more workers than concurrent plays."""
    return [f"worker-{number}" for number in range(min(workers, concurrency))]


class ProgramRunner:
    """Ray actor that runs the gate's program. However the actor ends, its program is killed."""

    def __init__(self, settings: GateSettings, folder: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        if Path(folder).is_dir():
            os.chdir(folder)
        self._gate = Gate(settings)
        self._open = contextlib.AsyncExitStack()
        self._session: GateSession | None = None

    async def tasks(self) -> Tasks:
        """Start the program, and return the tasks that it offers. Raises `GateFailed`."""
        self._session = await self._open.enter_async_context(self._gate.session())
        return self._session.tasks

    async def play(self, play: Play) -> float:
        """Let the program play, and return the score. Raises `GateFailed`."""
        assert self._session is not None
        return await self._session.play(play.version, play.task, play.seed)


class RayGateWorker:
    """Worker of a `PlayDispatcher` that calls a Ray actor."""

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
    """Connect to the Ray cluster. Blocks. Raises `Unavailable` if it does not respond."""
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    except (OSError, GetTimeoutError, RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise Unavailable(f"no Ray cluster at registry.gate.ray.address = {address}: {first}") from None


def start(settings: GateSettings) -> dict[str, RayGateWorker]:
    """Create the workers by name. Ray places a worker, and starts its program, when its tasks are requested for the
    first time."""
    ray_settings = settings.ray
    program_settings = settings.model_copy(update={"ray": ray_settings.model_copy(update={"workers": 0})})
    environment = {name: os.environ[name] for name in settings.environment if name in os.environ}
    actor = ray.remote(ProgramRunner).options(  # type: ignore[attr-defined, unused-ignore]
        num_cpus=CPUS_OF_COPY, max_restarts=0, max_concurrency=settings.concurrency, scheduling_strategy="SPREAD"
    )
    return {
        name: RayGateWorker(actor.remote(program_settings, str(Path.cwd()), environment))
        for name in worker_names(ray_settings.workers, settings.concurrency)
    }
