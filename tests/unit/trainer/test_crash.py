"""Tests of crashes by brute force (P4): the process dies before and after every durable write and every published
event.

The oracle is an undisturbed run. On the CPU, training is deterministic, so the final weights must have equal bytes: an
experience that was trained twice, or not at all, would change them. `make test` crashes at every fifth point, `make
test-long` at each point.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace_runtime.storage.blobs import BlobStore, digest_of
from headrace_runtime.storage.records import Records
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Event
from headrace_schemas.events.checkpoint import LISTED_MAX
from headrace_schemas.values.blobs import BlobRef
from headrace_trainer.backends import Backend
from headrace_trainer.batches.batch import Batch
from headrace_trainer.experiences import state
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.learner import LearnerLost, StepResult
from headrace_trainer.lineage import opening
from headrace_trainer.lineage.saved import Pointer
from headrace_trainer.lineage.step_journal import StepLost
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trainer import Trainer
from tests.simulation import services
from tests.simulation.services import RememberingLearner
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import Bus, World, decision, experience


class Died(BaseException):
    """Death of the process as by SIGKILL, which no handler catches."""


class Fuse:
    """Counter that raises `Died` at call number `at`, or never if `at` is None. `points` counts the calls."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.points = 0

    def __call__(self) -> None:
        self.points += 1
        if self.points == self.at:
            raise Died


class FragileBlobs(BlobStore):
    """Blob store that calls the fuse before each durable change. A crash after a change is a crash before the next
    one."""

    def __init__(self, url: str, fuse: Fuse) -> None:
        super().__init__(url)
        self._burn = fuse
        self._written_digests: set[str] = set()

    def put(self, data: bytes) -> BlobRef:
        ref = self.ref(data)
        if ref.sha256 not in self._written_digests:  # putting it again changes nothing
            self._burn()
            self._written_digests.add(ref.sha256)
        return super().put(data)

    def put_file(self, path: Path, *, move: bool = False) -> BlobRef:
        digest, _ = digest_of(path)
        if digest not in self._written_digests:
            self._burn()
            self._written_digests.add(digest)
        return super().put_file(path, move=move)

    def create(self, name: str, data: bytes) -> bool:
        self._burn()
        return super().create(name, data)

    def remove_area(self, name: str) -> None:
        self._burn()
        super().remove_area(name)

    def delete(self, ref: BlobRef) -> None:
        if ref.sha256 in self._written_digests:
            self._burn()
            self._written_digests.discard(ref.sha256)
        super().delete(ref)


class FragileBus(Bus):
    """Bus that calls the fuse before each published event."""

    burn: Callable[[], None]

    async def send(self, event: Event) -> None:
        self.burn()
        await super().send(event)


Story = Callable[[World, str], None]


async def tell(
    folder: Path, settings: TrainerSettings, story: Story, die_at: int | None = None
) -> tuple[dict[str, Any], World, int]:
    """Train a lineage on the events of `story`, with one crash at the point `die_at`, and a new process after it.

    Returns:
        The result of the training, the world, and the number of points at which the process could have died.
    """
    fuse = Fuse(die_at)
    bus = FragileBus()
    bus.burn = fuse
    world = World(folder, bus=bus)
    world.blobs = FragileBlobs((folder / "blobs").as_uri(), fuse)
    trainer = await survive(world, settings, fuse)
    assert trainer.lineage is not None
    story(world, trainer.lineage.saved.checkpoint.version)
    await survive(world, settings, fuse)
    fuse.at = None
    return result(world), world, fuse.points


async def survive(world: World, settings: TrainerSettings, fuse: Fuse) -> Trainer:
    try:
        return await world.run(settings)
    except Died:
        fuse.at = None
        return await world.run(settings)


def result(world: World) -> dict[str, Any]:
    """Return the observable results. Versions are replaced by their numbers, because their names depend on blob
    paths."""
    saved = LineageStore(world.blobs, "main").read()
    assert saved is not None
    numbers = {published.version: published.number for published in saved.versions}
    text = re.sub(r"m@[0-9a-f]{16}", lambda match: f"v{numbers[match[0]]}", repr((world.bus.fates, saved.window)))
    return {
        "fates and window": text,
        "steps": saved.steps,
        "offsets": saved.offsets,
        "numbers": [published.number for published in saved.versions],
        "weights": saved.present.weights.sha256,
        "optimizer": saved.present.optimizer.sha256,
        "baselines": saved.baselines,
        "waiting": [item.experience.experience_id for item in saved.waiting],
    }


def plain_story(world: World, version: str) -> None:
    events = [experience(n, version, reward=(n * 7) % 3, task=f"t{n % 2}") for n in range(11)]
    world.bus.produce(*events[:6], events[2], events[3], *events[6:])  # two redeliveries
    world.bus.produce(experience(1, version, reward=-1.0, revision=1), experience(12, version, reward=None))
    world.bus.add("experiences", b"poison")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("lora", "stride", "beside"),
    [
        pytest.param(0, 1, False, marks=pytest.mark.long),
        pytest.param(0, 1, True, marks=pytest.mark.long),
        (0, 23, False),
        (0, 29, True),
        pytest.param(2, 6, False, marks=pytest.mark.long),
    ],
)
async def test_a_death_at_any_point_changes_nothing(
    tmp_path: Path, make: Make, lora: int, stride: int, beside: bool
) -> None:
    settings = make(lora={"rank": lora}, memory={"restore_points": 3}, save_beside=beside)
    expected, _, points = await tell(tmp_path / "calm", settings, plain_story)
    assert expected["steps"] == 3
    assert points > 30
    for at in range(1, points + 1, stride):
        result, world, _ = await tell(tmp_path / f"{at}", settings, plain_story, at)
        assert result == expected, f"died at point {at}"
        assert garbage(world) <= 1, f"died at point {at}: blobs are left over"


def garbage(world: World) -> int:
    """Return the number of unreferenced blobs, except those of a version that was stored just before the crash."""
    newest = Records(world.blobs, "lineages/main").newest()
    assert newest is not None
    pointer = Pointer.model_validate_json(newest.data)
    saved = LineageStore(world.blobs, "main").read()
    assert saved is not None
    needed = set(saved.blobs()) | {pointer.state.sha256 if pointer.state else ""}
    epochs = {epoch: area.digests() for epoch, area in areas(world.blobs)}
    left = sum(pointer.epochs.get(digest) != epoch for epoch, digests in epochs.items() for digest in digests)
    for published in saved.versions:
        needed |= {published.manifest.sha256}
        needed |= {file.blob.sha256 for file in read_manifest(world.blobs, published.manifest).files}
    return left + len(set(world.blobs.digests()) - needed)


def areas(blobs: BlobStore) -> list[tuple[int, BlobStore]]:
    """Return the areas of all owners of the lineage by epoch."""
    return [(int(name), blobs.area(f"lineages/main/{name}")) for name in blobs.areas("lineages/main")]


async def test_the_oracle_would_notice_an_experience_trained_twice(tmp_path: Path, make: Make) -> None:
    """The comparison above can fail: an unrecognised redelivery gives other weights."""

    def twice(world: World, version: str) -> None:
        world.bus.produce(experience(2, version, reward=2.0, task="t0").model_copy(update={"experience_id": "again"}))
        plain_story(world, version)

    calm, _, _ = await tell(tmp_path / "calm", make(), plain_story)
    other, _, _ = await tell(tmp_path / "other", make(), twice)
    assert calm["weights"] != other["weights"]


@pytest.mark.long
async def test_p4_offsets_outside_the_checkpoint_would_be_caught(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected fault: the offsets survive a crash, but the weights do not."""
    outside: dict[str, dict[int, int]] = {}

    def forgetful(*args: Any) -> LineageState:
        ledger = make_ledger(*args)
        for topic, offsets in ledger.offsets.items():
            outside.setdefault(topic, {}).update(offsets)
        ledger.offsets = outside
        return ledger

    make_ledger = opening._restore_state
    expected, _, points = await tell(tmp_path / "calm", make(), plain_story)
    monkeypatch.setattr(opening, "_restore_state", forgetful)
    caught = 0
    for at in range(points // 2, points, 4):
        outside.clear()
        caught += (await tell(tmp_path / f"{at}", make(), plain_story, at))[0] != expected
    assert caught > 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("stride", "listed"),
    [pytest.param(1, LISTED_MAX, marks=pytest.mark.long), pytest.param(1, 3, marks=pytest.mark.long),
     (29, LISTED_MAX), (31, 3)],
)  # fmt: skip
async def test_a_death_around_a_refused_version_changes_nothing(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, stride: int, listed: int
) -> None:
    """The registry refuses version 1 while version 2 exists.

    The weights go back to the base, the offsets stay, and undone experiences are queued and trained once more. `listed`
    is the number of entries in a list of an account; a larger rollback is reported in several accounts.
    """
    settings = make(max_staleness=20)
    monkeypatch.setattr(state, "LISTED_MAX", listed)

    def refusal(world: World, version: str) -> None:
        world.bus.produce(decision(world.bus.checkpoints[1].version, "rejected", previous=version))
        world.bus.produce(*(experience(n, version, reward=n % 3, task="t") for n in range(20, 24)))

    async def run_story(folder: Path, die_at: int | None) -> tuple[dict[str, Any], int]:
        fuse = Fuse(None)
        world = World(folder)
        world.blobs = FragileBlobs((folder / "blobs").as_uri(), fuse)
        await world.run(settings)
        first = world.bus.checkpoints[0].version
        world.bus.produce(*(experience(n, first, reward=n % 3, task="t") for n in range(8)))
        await world.run(settings)
        refusal(world, first)
        fuse.at, fuse.points = die_at, 0
        await survive(world, settings, fuse)
        fuse.at = None
        undone = [len(account.undone) for account in world.bus.accounts if account.undone]
        assert undone == ([8] if listed > 8 else [3, 3, 2])
        return result(world), fuse.points

    expected, points = await run_story(tmp_path / "calm", None)
    assert expected["steps"] == 5
    assert expected["numbers"] == [0, 1, 2, 3, 4, 5]
    for at in range(1, points + 1, stride):
        assert (await run_story(tmp_path / f"{at}", at))[0] == expected, f"died at point {at}"


class KillingLearner(RememberingLearner):
    """Learner that ends its process, or is lost, in each step with certain experiences."""

    def __init__(self, lineage: str, poison: Collection[str], failure: Callable[[], BaseException]) -> None:
        super().__init__(lineage)
        self._poison = poison
        self._failure = failure

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if any(row.experience_id in self._poison for row in batch.rows):
            raise self._failure()
        return super().step(batch, stop, from_base=from_base)


def using(poison: Collection[str], failure: Callable[[], BaseException]) -> Any:
    backend = Backend(lambda _, settings: KillingLearner(settings.lineage, poison, failure))
    return mock.patch("headrace_trainer.torch_learner.TORCH", backend)


def killing_settings(steps_per_version: int = 2) -> TrainerSettings:
    small = {"batch_experiences": 8, "batch_experiences_min": 1, "batch_wait_s": 30.0, "save_interval_s": 1e9}
    table = {**small, "base": str(services.BASE), "model": "m", "max_staleness": 9}
    return TrainerSettings.model_validate(table | {"steps_per_version": steps_per_version})


async def run_until_survived(world: World, settings: TrainerSettings, deaths_max: int) -> None:
    for _ in range(deaths_max + 1):
        with contextlib.suppress(Died, LearnerLost, StepLost):
            await world.run(settings)
            return
    raise AssertionError(f"{deaths_max + 1} processes died")


REASONS: dict[str, Callable[[], BaseException]] = {
    "the training process ended during the step": Died,
    "LearnerLost: a rank raised ValueError: odd row": lambda: LearnerLost("a rank raised ValueError: odd row"),
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("poison", [{"e3"}, {"e8"}, {"e2", "e5"}, {"e20"}])
async def test_an_experience_that_kills_each_process_is_dropped_by_name_and_the_others_are_trained(
    tmp_path: Path, reason: str, poison: set[str]
) -> None:
    world, settings = World(tmp_path), killing_settings()
    with using(poison, REASONS[reason]):
        await world.run(settings)
        version = world.bus.checkpoints[0].version
        world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(32)))
        await run_until_survived(world, settings, 12 * len(poison))
    verdicts = {outcome.experience_id: outcome for outcome in world.bus.verdicts}
    assert {name for name, outcome in verdicts.items() if outcome.dropped} == poison
    assert all((verdicts[name].dropped, verdicts[name].detail) == ("invalid", reason) for name in poison)
    assert {name for (name, _), outcome in world.bus.fates.items() if outcome == "trained"} == {
        f"e{n}" for n in range(32)
    } - poison
    batches = [record for account in world.bus.accounts for record in account.batches]
    assert {name for record in batches for name in record.left_out} == poison, "a replay leaves them out, too"


async def test_a_batch_that_grows_between_the_deaths_of_its_processes_is_taken_apart(tmp_path: Path) -> None:
    world, settings, number = World(tmp_path), killing_settings(1), 4
    with using({"e1"}, Died):
        await world.run(settings)
        version = world.bus.checkpoints[0].version
        world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(number)))
        for _ in range(12):
            with contextlib.suppress(Died):
                await world.run(settings, wait_s=30.0)
                break
            world.bus.produce(experience(number, version, reward=number % 3))
            number += 1
    assert [name for (name, _), outcome in world.bus.fates.items() if outcome != "trained"] == ["e1"]


async def test_processes_that_are_killed_from_outside_drop_nothing(tmp_path: Path) -> None:
    world, settings, kills = World(tmp_path), killing_settings(), iter(range(5))

    class UnluckyLearner(RememberingLearner):
        def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
            if next(kills, None) is not None:
                raise Died
            return super().step(batch, stop, from_base=from_base)

    backend = Backend(lambda _, chosen: UnluckyLearner(chosen.lineage))
    with mock.patch("headrace_trainer.torch_learner.TORCH", backend):
        await world.run(settings)
        version = world.bus.checkpoints[0].version
        world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(16)))
        await run_until_survived(world, settings, 8)
    assert list(world.bus.fates.values()) == ["trained"] * 16


async def test_a_learner_that_kills_its_process_at_every_step_drops_nothing(tmp_path: Path) -> None:
    world, settings = World(tmp_path), killing_settings()
    everything: Any = mock.MagicMock(__contains__=lambda *_: True)
    with using((), Died):
        await world.run(settings)
        version = world.bus.checkpoints[0].version
        world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(16)))
    with using(everything, Died):
        for _ in range(11):
            with pytest.raises((Died, StepLost)):
                await world.trainer(settings).run()
    assert world.bus.fates == {}
    with using((), Died):
        await world.run(settings)
    assert list(world.bus.fates.values()) == ["trained"] * 16
