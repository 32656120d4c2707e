"""The three grounds: the simulated bus on its virtual clock, and a bus at an address, which is real."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.settings.sections import BusSettings
from tests.contract.bus import clients
from tests.contract.used.ground import Scenario
from tests.simulation import kafka, world
from tests.simulation.bus import Bus
from tests.simulation.loop import VirtualLoop
from tests.simulation.mishaps import Mishaps
from tests.simulation.process import Process, TaskGroup, alive, end_others, task_factory
from tests.simulation.trace import Trace

if TYPE_CHECKING:
    from tests.simulation.database import Server


class RealGround:
    """A bus that listens somewhere. Processes are tasks."""

    def __init__(self, address: str, folder: Path, seed: int) -> None:
        self.bus = Overrides(None, {}, {}).bus_settings(address).model_copy(update={"session_timeout_s": 6.0})
        self.folder = folder
        self.draw = random.Random(seed)

    async def create(self, partitions: int) -> str:
        name = f"used-{uuid.uuid4().hex[:12]}"
        async with clients.administering(self.bus.address) as admin:
            await clients.create(admin, name, partitions)
        return name

    def spawn(self, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(main())


class SimulatedGround:
    """A `World` with only a bus; no fault is ordered, but chance plays every permitted behaviour."""

    request_timeout_s = 3.0

    def __init__(self, folder: Path, seed: int) -> None:
        """`bus` is the services' setting; the simulated clients find the bus itself in their world."""
        self.folder = folder
        self.draw = random.Random(seed)
        self.bus = BusSettings(address="simulated:9092", request_timeout_s=self.request_timeout_s)
        self.world = _World(seed, self.request_timeout_s)
        self._made = 0

    async def create(self, partitions: int) -> str:
        self._made += 1
        name = f"used-{self._made}"
        self.world.bus.create(name, partitions)
        return name

    def spawn(self, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        self._made += 1
        return Process(f"process-{self._made}", "used", 0).spawn(main())


class _World:
    def __init__(self, seed: int, request_timeout_s: float) -> None:
        self.bus = Bus(random.Random(f"bus {seed}"), Trace())
        self.injected: Counter[str] = Counter()
        self.mishaps = Mishaps(self.count)
        self.databases: dict[str, Server] = {}
        self.request_timeout_s = request_timeout_s
        self.skews_s: dict[str, float] = {}

    def count(self, fault: str) -> None:
        self.injected[fault] += 1


def play_for_real(scenario: Scenario, address: str, folder: Path, seed: int) -> None:
    """Run the scenario. Raises its exception."""
    asyncio.run(scenario(RealGround(address, folder, seed)))


def play_simulated(scenario: Scenario, seed: int) -> None:
    """Run the scenario in the simulated world, where no time passes outside. Raises its exception."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder, _installed():
        ground = SimulatedGround(Path(folder), seed)
        loop = VirtualLoop(lambda: ground.world.bus.draw.random() * 1e-3, alive)
        loop.set_task_factory(task_factory)
        asyncio.set_event_loop(loop)
        world.enter(ground.world)
        try:
            loop.run_until_complete(_play(scenario, ground))
        finally:
            world.leave()
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Replace Kafka's clients by the simulation's, and no other name."""
    with contextlib.ExitStack() as stack:
        for name, substitute in {**kafka.STANDS_FOR, "asyncio.TaskGroup": TaskGroup}.items():
            stack.enter_context(mock.patch(name, substitute))
        yield


async def _play(scenario: Scenario, ground: SimulatedGround) -> None:
    try:
        await Process("scenario", "used", 0).spawn(scenario(ground))
    finally:
        with contextlib.suppress(AssertionError):  # what went wrong before matters more
            await end_others()
