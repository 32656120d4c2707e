"""Deals plays to workers. Nothing here knows what a worker is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace_registry.gate import GateFailed
from headrace_runtime.errors import HeadraceError
from headrace_runtime.logs import get_logger
from headrace_schemas.gate import Play, Tasks

log = get_logger(__name__)


class WorkerLost(HeadraceError):
    """A worker is gone, with its machine perhaps. Its program has not failed, so its plays may be another's."""


class GateWorker(Protocol):
    """A running copy of the gate's program. Each may raise `WorkerLost`, and `GateFailed` as the program's verdict."""

    async def tasks(self) -> Tasks: ...

    async def play(self, play: Play) -> float: ...


class Dealer:
    """Gives each play to the worker that has the fewest. A lost worker's plays go to the others: version, task and seed
    say all that a play is."""

    def __init__(self, workers: Mapping[str, GateWorker]) -> None:
        self._workers = dict(workers)
        self._playing = dict.fromkeys(workers, 0)

    async def tasks(self) -> Tasks:
        """What all workers name alike, once all are there. Raises `GateFailed` and `WorkerLost`."""
        found = await asyncio.gather(*(worker.tasks() for worker in self._workers.values()))
        return _alike(dict(zip(self._workers, found, strict=True)))

    async def play(self, play: Play) -> float:
        """Its score. Raises `GateFailed`, also once no worker is left."""
        while self._workers:
            name = min(self._workers, key=lambda one: self._playing[one])
            self._playing[name] += 1
            try:
                return await self._workers[name].play(play)
            except WorkerLost as error:
                if self._workers.pop(name, None) is not None:
                    log.warning("gate_worker_lost", worker=name, left=len(self._workers), error=str(error))
            finally:
                self._playing[name] -= 1
        raise GateFailed("every worker of the gate's program is lost")


def _alike(found: Mapping[str, Tasks]) -> Tasks:
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise GateFailed(f"workers {first} and {other} name other tasks: their machines have other files")
    return found[first]


def places(workers: int, concurrency: int) -> Sequence[str]:
    """Names of the workers: no more of them than plays at a time."""
    return [f"worker-{number}" for number in range(min(workers, concurrency))]
