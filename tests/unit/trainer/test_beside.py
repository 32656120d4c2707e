"""Tests of steps during a save (`trainer.save_beside`): the result is that of a blocking save."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import Unavailable
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.values.blobs import BlobRef
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import TrainerSettings
from tests.simulation import learner as simulated
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_crash import result
from tests.unit.trainer.world import World, decision, experience


@pytest.fixture(autouse=True)
def _remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    for target, stand_in in simulated.AS_TORCH.items():
        monkeypatch.setattr(target, stand_in)


@dataclass
class Pace:
    """Controls and counts the writes of `SlowBlobs`. Each write waits for `may`, and the next `away` writes fail."""

    may: threading.Event = field(default_factory=threading.Event)
    waits: threading.Event = field(default_factory=threading.Event)
    writing: int = 0
    most: int = 0
    away: int = 0


class SlowBlobs(BlobStore):
    """Blob store that waits before each file of a save. Its areas share one `Pace`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.pace = Pace()
        self.pace.may.set()

    def put_file(self, path: Path, *, move: bool = False) -> BlobRef:
        pace = self.pace
        pace.writing += 1
        pace.most = max(pace.most, pace.writing)
        pace.waits.set()
        assert pace.may.wait(30)
        pace.writing -= 1
        if pace.away:
            pace.away -= 1
            raise Unavailable("the store is away")
        return super().put_file(path, move=move)


def world_in(folder: Path) -> World:
    world = World(folder)
    world.blobs = SlowBlobs((folder / "blobs").as_uri())
    return world


async def begun(world: World, settings: Any) -> str:
    trainer = await world.run(settings)
    assert trainer.lineage is not None
    return trainer.lineage.saved.checkpoint.version


async def test_a_step_is_taken_while_the_save_before_it_is_written(tmp_path: Path, make: Make) -> None:
    settings = make(save_beside=True)
    world = world_in(tmp_path)
    blobs = world.blobs
    assert isinstance(blobs, SlowBlobs)
    first = await begun(world, settings)
    world.bus.produce(*(experience(n, first, reward=n % 3, task="t") for n in range(12)))
    blobs.pace.waits.clear()
    blobs.pace.may.clear()
    life = asyncio.create_task(world.run(settings))
    await asyncio.to_thread(blobs.pace.waits.wait, 30)
    for _ in range(2000):
        if len(world.reporter.steps) == 2:
            break
        await asyncio.sleep(0.005)
    assert len(world.reporter.steps) == 2, "the second step, and not the third: there is one save at a time"
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0], (
        "and nothing is announced before it is durable"
    )
    saved = LineageStore(world.blobs, "main").read()
    assert saved is not None
    assert saved.steps == 0
    blobs.pace.may.set()
    await life
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1, 2, 3]
    assert blobs.pace.most == 1


async def test_what_comes_of_it_is_the_same(tmp_path: Path, make: Make) -> None:
    """The stream has corrections, a withdrawal, and a version that is refused while the next version is being saved."""
    ends = []
    for beside in (False, True):
        settings = make(save_beside=beside, max_staleness=1, steps_per_version=2)
        world = world_in(tmp_path / str(beside))
        first = await begun(world, settings)
        world.bus.produce(*(experience(n, first, reward=n % 3, task="t") for n in range(20)))
        world.bus.produce(experience(1, first, reward=-1.0, revision=1, task="t"))
        await world.run(settings)
        world.bus.produce(*(experience(n, first, reward=n % 2, task="t") for n in range(20, 28)))
        world.bus.produce(decision(world.bus.checkpoints[1].version, "rejected", previous=first))
        world.bus.produce(*(experience(n, first, reward=n % 2, task="t") for n in range(30, 42)))
        await world.run(settings)
        ends.append((result(world), [account.batches for account in world.bus.accounts], [len(world.bus.verdicts)]))
    assert ends[0][0]["numbers"][-1] > 3
    assert ends[0] == ends[1]


async def with_the_store_away(world: World, settings: TrainerSettings, times: int) -> None:
    """Begin a lineage, make the next `times` writes of its store fail, and produce eight experiences."""
    first = await begun(world, settings)
    assert isinstance(world.blobs, SlowBlobs)
    world.blobs.pace.away = times
    world.bus.produce(*(experience(n, first, reward=n % 3, task="t") for n in range(8)))


async def test_a_store_that_is_away_is_waited_for(tmp_path: Path, make: Make) -> None:
    settings = make(save_beside=True, retry_s=30.0)
    world = world_in(tmp_path)
    await with_the_store_away(world, settings, 2)
    await world.run(settings)
    assert len(world.bus.fates) == 8
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1, 2]


async def test_a_store_that_stays_away_ends_the_process_and_costs_nothing(tmp_path: Path, make: Make) -> None:
    settings = make(save_beside=True, retry_s=0.2)
    world = world_in(tmp_path)
    await with_the_store_away(world, settings, 1000)
    with pytest.raises(Unavailable, match="away"):
        await world.run(settings)
    assert not world.bus.fates, "nothing is announced that is not durable"
    assert isinstance(world.blobs, SlowBlobs)
    world.blobs.pace.away = 0
    await world.run(settings)
    assert len(world.bus.fates) == 8
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1, 2]
