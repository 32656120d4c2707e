"""Distributes plays to workers of any kind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace_registry.gate.gate import GateFailed
from headrace_runtime.errors import HeadraceError
from headrace_runtime.process.logs import get_logger
from headrace_schemas.programs.gate import Play, Tasks

log = get_logger(__name__)


class WorkerLost(HeadraceError):
    """A worker is gone, perhaps with its machine. Its program has not failed, so another worker may do its plays."""


class GateWorker(Protocol):
    """A running copy of the gate's program. Each method may raise `WorkerLost`, and `GateFailed` if the program
    failed."""

    async def tasks(self) -> Tasks: ...

    async def play(self, play: Play) -> float: ...


class PlayDispatcher:
    """Gives each play to the worker that has the fewest. The plays of a lost worker go to the others, because version,
    task and seed fully describe a play."""

    def __init__(self, workers: Mapping[str, GateWorker]) -> None:
        self._workers = dict(workers)
        self._playing = dict.fromkeys(workers, 0)

    async def tasks(self) -> Tasks:
        """Return the tasks, once all workers have started and named the same ones. Raises `GateFailed` and
        `WorkerLost`."""
        task_lists = await asyncio.gather(*(worker.tasks() for worker in self._workers.values()))
        return _require_equal_tasks(dict(zip(self._workers, task_lists, strict=True)))

    async def play(self, play: Play) -> float:
        """Return the score of a play. Raises `GateFailed`, also once no worker is left."""
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
    """Return the names of the workers: at most as many as plays that run at a time."""
    return [f"worker-{number}" for number in range(min(workers, concurrency))]
