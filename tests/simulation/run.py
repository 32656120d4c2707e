"""One seed from beginning to end, and its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation import rest, world
from tests.simulation.cluster import Cluster
from tests.simulation.loop import Stuck, VirtualLoop
from tests.simulation.process import alive, end_others, task_factory
from tests.simulation.promises import check_all
from tests.simulation.substitutes import installed

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run. `broken` is empty when every promise was kept."""

    seed: int
    broken: tuple[str, ...]
    digest: str
    events: int
    virtual_s: float
    wall_s: float
    injected: Mapping[str, int]
    checks: Mapping[str, int]
    story: tuple[str, ...] = field(default=(), repr=False)

    @property
    def command(self) -> str:
        """Plays it again."""
        return f"python -m tests.system simulation --seeds 1 --first {self.seed} --verbose"


def simulate(seed: int, *, verbose: bool = False) -> Outcome:
    """Play a seed and check every promise. Failures of services never raise."""
    began = time.perf_counter()
    folder_root = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="headrace-", dir=folder_root) as folder, installed(seed), _litter_lies():
        return _play(Cluster(seed, Path(folder), verbose=verbose), began)


@contextlib.contextmanager
def _litter_lies() -> Iterator[None]:
    """When garbage is collected depends on all that was ever allocated, and connections of the dead have finalizers:
    within a run it has to wait."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        if enabled:
            gc.enable()


def _play(cluster: Cluster, began: float) -> Outcome:
    loop = VirtualLoop(cluster.thread_delay_s, alive)
    broken: list[str] = []

    def unheard(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if alive():
            broken.append(f"nobody heard: {context.get('message')}: {context.get('exception')!r}")

    loop.set_task_factory(task_factory)
    loop.set_exception_handler(unheard)
    asyncio.set_event_loop(loop)
    world.enter(cluster)
    try:
        loop.run_until_complete(cluster.play())
    except (rest.Restless, Stuck) as error:
        broken.append(f"liveness: {error}")
    finally:
        virtual_s, events = loop.time(), cluster.trace.counts["append"]
        _end(loop, cluster)
    checks = check_all(cluster)
    world.leave()
    broken += [text for check in checks for text in check.broken]
    return Outcome(
        seed=cluster.seed,
        broken=tuple(broken),
        digest=cluster.trace.digest(),
        events=events,
        virtual_s=virtual_s,
        wall_s=time.perf_counter() - began,
        injected=dict(cluster.injected),
        checks={check.promise: check.count for check in checks},
        story=tuple(cluster.trace.lines),
    )


def _end(loop: VirtualLoop, cluster: Cluster) -> None:
    loop.set_exception_handler(lambda *_: None)
    loop.more()

    async def kill() -> None:
        cluster.end()
        await end_others()

    loop.run_until_complete(kill())
    loop.run_until_complete(loop.shutdown_asyncgens())
    asyncio.set_event_loop(None)
    loop.close()
