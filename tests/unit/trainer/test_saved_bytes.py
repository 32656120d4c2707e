"""Tests of saves: restore points stay within their limit, a full disk is noticed, and steps go on meanwhile."""

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
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.lineage.saving import sum_bytes
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner import tensors
from tests.simulation import services
from tests.support.machine import small_disk
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_crash import result
from tests.unit.trainer.test_store import saved_of, stored, trained
from tests.unit.trainer.world import World, decision, experience


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("points", [3, 12])
@pytest.mark.parametrize("bytes_max", [1, 5, 8])
async def test_restore_points_keep_to_their_bytes_and_the_needed_ones_stay(
    world: World, make: Make, points: int, bytes_max: int
) -> None:
    size = sum_bytes([(await trained(world, make)).present])
    memory: dict[str, Any] = {"restore_points": points, "restore_points_bytes": bytes_max * size}
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(200, 240)))
    saved = saved_of(await world.run(make(memory=memory, max_staleness=40)))
    needed = {saved.versions[0].version, saved.head, *saved.promoted}
    restore_points = saved.restore_points
    assert restore_points.keys() >= needed
    assert len(restore_points) <= max(points, len(needed))
    assert restore_points.keys() == needed or sum_bytes([saved.present, *restore_points.values()]) <= bytes_max * size
    assert len(restore_points) == min(points, max(len(needed), bytes_max)) or bytes_max == 1 or points == 12
    newest = [published.version for published in saved.versions if published.version in restore_points]
    assert newest[-1] == saved.head
    assert stored(world) >= set(saved.blobs())
    assert LineageStore(world.blobs, "main").read() == saved
    assert saved_of(await world.run(make(memory=memory, max_staleness=40))) == saved, "it is continued from there"


async def test_champions_keep_their_restore_points_while_these_fit(world: World, make: Make) -> None:
    size = sum_bytes([(await trained(world, make)).present])
    base, champion, head = (checkpoint.version for checkpoint in world.bus.checkpoints)
    world.bus.produce(decision(champion, "promoted", base))
    world.bus.produce(*(experience(n, head, reward=n % 3) for n in range(100, 104)))
    wide = saved_of(await world.run(make(memory={"restore_points_bytes": 3 * size})))
    assert wide.restore_points.keys() == {base, champion, wide.head}
    world.bus.produce(*(experience(n, head, reward=n % 3) for n in range(104, 108)))
    narrow = saved_of(await world.run(make(memory={"restore_points_bytes": size})))
    assert narrow.promoted == (champion, base)
    assert narrow.restore_points.keys() == {base, narrow.head}


async def test_weights_that_went_back_without_a_restore_point_are_those_of_the_version(
    world: World, make: Make
) -> None:
    settings = make(memory={"restore_points_bytes": 1}, batch_experiences=64)
    await trained(world, make, memory={"restore_points_bytes": 1})
    _, champion, head = (checkpoint.version for checkpoint in world.bus.checkpoints)
    world.bus.produce(decision(champion, "promoted"), decision(head, "rejected", champion, number=1))
    saved = saved_of(await world.run(settings))
    assert saved.head == champion not in saved.restore_points
    assert saved.present.assembly is not None, "they are stored once, with the version"
    assert saved.present.assembly.frame.size < 0.1 * saved.present.weights.size
    assert saved_of(await world.run(settings)).present == saved.present, "it is continued from there"


async def test_save_stores_the_weights_before_it_writes_the_optimizer(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[list[str]] = []

    def record(folder: Path, *arguments: Any) -> None:
        left.append(sorted(path.name for path in folder.rglob("*.safetensors")))
        write_optimizer(folder, *arguments)

    write_optimizer = tensors.write_optimizer
    monkeypatch.setattr(tensors, "write_optimizer", record)
    saved = await trained(world, make)
    assert left[0] == ["weights.safetensors"], "the base's"
    assert left[1:] == [[]] * saved.steps


@pytest.mark.parametrize(
    ("megabytes", "setting", "interval_s"), [(1, None, 30), (100, None, 100), (9000, None, 1800), (100, 5.0, 5)]
)
async def test_steps_of_large_models_are_saved_less_often(
    world: World, make: Make, megabytes: int, setting: float | None, interval_s: float
) -> None:
    saved = await trained(world, make)
    settings = make(save_interval_s=setting, steps_per_version=100, batch_experiences=4)
    lineage = open_lineage(settings, world.blobs, world.clock)
    large = saved.present.weights.model_copy(update={"size": megabytes * 10**6 - saved.present.optimizer.size})
    present = saved.present.model_copy(update={"weights": large})
    lineage.saved = saved.model_copy(update={"present": present})
    lineage.state.steps += 1
    assert not lineage.is_save_due(interval_s - 0.1)
    assert lineage.is_save_due(interval_s)
    lineage.close()


async def test_trainer_pauses_before_the_disk_is_full_and_goes_on_with_room(tmp_path: Path, make: Make) -> None:
    with small_disk(tmp_path / "disk", 48) as disk:
        world = World(disk.path)
        await world.run(make())
        version = world.bus.checkpoints[0].version
        world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(8)))
        ballast = disk.path / "ballast"
        ballast.write_bytes(bytes(disk.free_bytes - 2_000_000))  # above what is written next, below what stays free
        left = disk.free_bytes
        trainer = world.trainer(make())
        running = asyncio.create_task(trainer.run())
        async with asyncio.timeout(60):
            while trainer.room.trouble is None:  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0.01)
        assert str(trainer.paused).startswith("training is paused: disk: ")
        assert f"free on {disk.path}/blobs" in str(trainer.paused)
        assert not running.done()
        assert world.bus.fates == {}
        async with asyncio.timeout(60):  # the check of the disk writes a megabyte and removes it, a save would stay
            while disk.free_bytes < left - 100_000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        ballast.unlink()
        await asyncio.gather(running, return_exceptions=True)
        assert trainer.paused is None
        assert set(world.bus.fates.values()) == {"trained"}
        assert len(world.bus.fates) == 8


def test_store_that_is_no_folder_has_no_disk_of_ours() -> None:
    assert BlobStore("memory://restore-points").space_problem(1 << 60, None) is None


@pytest.fixture
def _simulated_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for target, stand_in in services.AS_TORCH.items():
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


@pytest.mark.usefixtures("_simulated_weights")
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


@pytest.mark.usefixtures("_simulated_weights")
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


@pytest.mark.usefixtures("_simulated_weights")
async def test_a_store_that_is_away_is_waited_for(tmp_path: Path, make: Make) -> None:
    settings = make(save_beside=True, retry_s=30.0)
    world = world_in(tmp_path)
    await with_the_store_away(world, settings, 2)
    await world.run(settings)
    assert len(world.bus.fates) == 8
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1, 2]


@pytest.mark.usefixtures("_simulated_weights")
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
