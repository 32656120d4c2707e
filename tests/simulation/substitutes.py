"""Complete list of the names in the services' code that the simulation replaces.

Kafka's client libraries, the database driver, the blob store's disk, HTTP, threads, clocks and random numbers are
replaced, and so is the arithmetic of training. All other code is the production code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import structlog
from fsspec.implementations.memory import MemoryFileSystem
from sqlalchemy.exc import SAWarning

from headrace_registry.gate.gate import GateFailed
from headrace_registry.settings import GateSettings
from headrace_runtime.settings.sections import BusSettings, Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Trajectory
from headrace_schemas.programs import Tasks
from headrace_schemas.values.blobs import BlobRef
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.functions.outcomes import CallRequest, Outcome, outcome_of
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.settings import ScorerSettings
from tests.simulation import clients, faust_app, services
from tests.simulation.bus import open_database
from tests.simulation.process import TaskGroup, VirtualClock, world

BLOBS = "memory://blobs"
_PUT, _SET_POINTER, _DELETE = BlobStore.put, BlobStore.set_pointer, BlobStore.delete
_CREATE, _REMOVE_AREA = BlobStore.create, BlobStore.remove_area


class LocalPool(FunctionPool):
    """Pool of one reward function without processes, which looks at the answer and sometimes fails."""

    def __init__(self, settings: ScorerSettings) -> None:
        super().__init__(settings)
        self.functions = (
            RewardFunction(name="right", spec="here", parameters=("trajectory",), asynchronous=False, digest="0" * 64),
        )

    async def reload(self) -> None:
        """Do nothing, because there is no file to reload."""

    async def call(self, call: CallRequest, trajectory: bytes) -> Outcome:
        await asyncio.sleep(world().bus.draw.expovariate(20))
        return outcome_of(right(Trajectory.from_json(trajectory)))


def right(trajectory: Trajectory) -> float | None:
    """Return 1 for a right answer and 0 for a wrong one; abstain when there is neither."""
    word = trajectory.final_answer.partition(" ")[0]
    return {"right": 1.0, "wrong": 0.0}.get(word)


class LocalGate:
    """Replacement of the gate's program: most versions are as good as the champion, some are worse, some runs fail."""

    sha256 = "0" * 64
    configured = True

    def __init__(self, _settings: GateSettings) -> None:
        """Start no server."""

    @contextlib.asynccontextmanager
    async def session(self, *, use_spare: bool = False) -> AsyncIterator[LocalPlaySession]:
        del use_spare
        await asyncio.sleep(world().bus.draw.expovariate(2))
        yield LocalPlaySession()

    def prepare(self) -> None:
        """Return at once, because a session has no process."""


class LocalPlaySession:
    """Running session of the gate's program."""

    tasks = Tasks(gate=("t1", "t2"), audit=("a1", "a2"))

    async def play(self, version: str, _task: str, _seed: int) -> float:
        luck = random.Random(version).random()
        if luck < 0.05:
            raise GateFailed("out of luck")
        return 0.2 if luck < 0.15 else 0.6


def _put(store: BlobStore, data: bytes) -> BlobRef:
    world().mishaps.at_blob_change()
    return _PUT(store, data)


def _set_pointer(store: BlobStore, name: str, data: bytes) -> None:
    world().mishaps.at_blob_change()
    _SET_POINTER(store, name, data)


def _create(store: BlobStore, name: str, data: bytes) -> bool:
    world().mishaps.at_blob_change()
    return _CREATE(store, name, data)


def _remove_area(store: BlobStore, name: str) -> None:
    world().mishaps.at_blob_change()
    _REMOVE_AREA(store, name)


def _delete(store: BlobStore, ref: BlobRef) -> None:
    world().mishaps.at_blob_change()
    _DELETE(store, ref)


async def _ensure(_settings: BusSettings) -> None:
    await clients.ask(world().bus, 60.0)


async def _nothing(*_: object) -> None:
    """Do nothing, because the tables exist already."""


@contextlib.asynccontextmanager
async def _serve(*_: object) -> AsyncIterator[int]:
    yield 0


def _names() -> Mapping[str, Any]:
    return {
        "asyncio.TaskGroup": TaskGroup,
        **faust_app.STANDS_FOR,
        "headrace_runtime.storage.database.Database.open": lambda service, _common: open_database(service),
        "headrace_runtime.storage.blobs.BlobStore.put": _put,
        "headrace_runtime.storage.blobs.BlobStore.set_pointer": _set_pointer,
        "headrace_runtime.storage.blobs.BlobStore.delete": _delete,
        "headrace_runtime.storage.blobs.BlobStore.create": _create,
        "headrace_runtime.storage.blobs.BlobStore.remove_area": _remove_area,
        "headrace_runtime.kafka.topics.ensure": _ensure,
        "headrace_runtime.storage.database.migrate": _nothing,
        "headrace_runtime.http.web.serve": _serve,
        "headrace_runtime.http.web.app": _nowhere,
        "headrace_runtime.stream.stream_service.SystemClock": VirtualClock,
        "headrace_collector.app.SystemClock": VirtualClock,
        "headrace_trainer.app.SystemClock": VirtualClock,
        "headrace_registry.app.SystemClock": VirtualClock,
        "headrace_runtime.kafka.dead_letters.utcnow": lambda: VirtualClock().now(),
        "headrace_registry.app.Gate": LocalGate,
        "headrace_scorer.app.FunctionPool": LocalPool,
        # Less often than in production: steps without effect are most of what a run would cost.
        "headrace_collector.app._ENDS_INTERVAL_S": 6.0,
        "headrace_collector.app._IDLE_INTERVAL_S": 6.0,
        "headrace_collector.app._BOUNDS_INTERVAL_S": 9.0,
        "headrace_collector.app._FORGET_INTERVAL_S": 9.0,
        "headrace_collector.app._TARGETS_INTERVAL_S": 9.0,
        "headrace_scorer.app._END_WAITING_INTERVAL_S": 6.0,
        "headrace_scorer.app._FORGET_INTERVAL_S": 20.0,
        "headrace_scorer.app._MEASURE_INTERVAL_S": 20.0,
        "headrace_scorer.scoring._POLL_S": 6.0,
        **services.STANDS_FOR,
    }


def _nowhere(*_: object, **__: object) -> None:
    return None


@contextlib.contextmanager
def installed(seed: int) -> Iterator[None]:
    """Replace the real world by the simulated one, with random numbers from `seed`, during the block."""
    noise = random.Random(f"noise {seed}")
    structure = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    environ = {
        **_names(),
        "os.urandom": lambda size: noise.randbytes(size),
        "headrace_schemas.values.ids.time": SimpleNamespace(
            time_ns=lambda: round(VirtualClock().now().timestamp() * 1e9)
        ),
    }
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", SAWarning)  # who dies while connecting does not give the connection back
        logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
        stack.callback(structlog.configure, **structure)
        stack.callback(MemoryFileSystem.store.clear)
        for name, substitute in environ.items():
            stack.enter_context(mock.patch(name, substitute))
        yield


def common(request_timeout_s: float, folder: Path) -> Common:
    """Return the settings of every simulated service. `folder` belongs to this run; its files outlive processes."""
    return Common.model_validate(
        {
            "data_dir": folder,
            "bus": {"address": "simulated:9092", "request_timeout_s": request_timeout_s},
            "blobs": {"url": BLOBS},
        }
    )
