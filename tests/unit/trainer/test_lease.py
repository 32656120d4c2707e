"""Tests of takeovers of a lineage, and of their effect on the former owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.storage.blobs import BlobStore
from headrace_trainer.lineage.lease import Lease
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.lineage.saved import LegacyPointer, Pointer
from headrace_trainer.lineage.store import LineageStore, LineageTaken
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_store import pointer_of, saved_of, stored, trained
from tests.unit.trainer.world import HandClock, World, experience

LEASE_S, WAIT_S = 10.0, 60.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore((tmp_path / "blobs").as_uri())


def owner(blobs: BlobStore, name: str = "elsewhere") -> LineageStore:
    store = LineageStore(blobs, "main", name)
    assert store.take_over()
    return store


class WaitingProcess:
    """Process that waits for the lineage. `looks` is called between two checks of the lease."""

    def __init__(self, blobs: BlobStore, looks: Callable[[], object] = lambda: None, **options: Any) -> None:
        self.clock = HandClock()
        self.store = LineageStore(blobs, "main")
        self.lease = Lease(self.store, self.clock, LEASE_S, WAIT_S, **options)
        self._looks = looks

    async def acquire(self) -> float:
        """Acquire the lease, and return the waiting time in seconds."""
        await self.lease.acquire(self._do)
        return self.clock.offset_s

    async def _do(self, work: Callable[[], Any]) -> Any:
        self._looks()
        return work()


async def test_a_lineage_of_nobody_is_taken_at_once(blobs: BlobStore) -> None:
    assert await WaitingProcess(blobs).acquire() < 1


async def test_an_owner_that_shows_nothing_is_waited_for_as_long_as_its_lease(blobs: BlobStore) -> None:
    owner(blobs)
    assert LEASE_S <= await WaitingProcess(blobs).acquire() < LEASE_S + 5


async def test_signs_of_life_are_waited_for_and_the_waiter_ends_by_name(blobs: BlobStore) -> None:
    living = owner(blobs, "host|boot|space|17|4|x")
    waiting = WaitingProcess(blobs, living.beat)
    with pytest.raises(LineageTaken, match=r"process 17 on host trains this lineage.*owner_wait_s.*Stop one of them"):
        await waiting.acquire()
    assert waiting.lease.is_waiting
    living.beat()


async def test_a_lineage_that_was_given_up_is_taken_at_once(blobs: BlobStore) -> None:
    living = owner(blobs)
    living.beat()
    living.release()
    assert await WaitingProcess(blobs).acquire() < 1


async def test_a_death_that_can_be_seen_is_not_waited_for(blobs: BlobStore) -> None:
    owner(blobs)
    assert await WaitingProcess(blobs, died=lambda name: name == "elsewhere").acquire() < 1


async def test_who_was_taken_over_from_hears_it_with_its_next_sign_and_its_next_save(
    world: World, make: Make, blobs: BlobStore
) -> None:
    first = open_lineage(make(), blobs, world.clock)
    await WaitingProcess(blobs).acquire()
    with pytest.raises(LineageTaken, match=r"lineage main belongs to process \d+ on .*can save nothing any more"):
        first._store.beat()
    with pytest.raises(LineageTaken):
        first.save(publish=False)


async def test_of_several_who_wait_one_alone_gets_it(blobs: BlobStore) -> None:
    owner(blobs)
    waiting = [WaitingProcess(blobs) for _ in range(4)]
    stores = [item.store for item in waiting]
    await asyncio.gather(waiting[0].acquire(), *(item.acquire() for item in waiting[1:]))
    sign = LineageStore(blobs, "main").read_owner_sign()
    for store in stores:
        if store.owner == sign.owner:
            store.beat()
        else:
            with pytest.raises(LineageTaken):
                store.beat()


async def test_a_take_over_between_look_and_take_is_noticed(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = LineageStore(blobs, "main"), LineageStore(blobs, "main")
    create = BlobStore.create

    def beaten(self: BlobStore, name: str, data: bytes) -> bool:
        monkeypatch.undo()
        assert second.take_over()
        return create(self, name, data)

    monkeypatch.setattr(BlobStore, "create", beaten)
    assert not first.take_over()
    second.beat()


async def test_what_the_dead_left_is_swept_and_nothing_else(world: World, make: Make) -> None:
    saved = await trained(world, make)
    late = open_lineage(make(), world.blobs, world.clock)
    garbage = late._store._area(late._store._epoch).put(b"of a save that was cut short")
    heir = open_lineage(make(), world.blobs, world.clock)
    assert garbage.sha256 not in stored(world)
    assert LineageStore(world.blobs, "main").read() == saved
    late._store._area(late._store._epoch).put(b"of one who does not know yet")
    heir.save(publish=False)
    open_lineage(make(), world.blobs, world.clock)
    state = pointer_of(world).state
    assert state is not None
    assert stored(world) == set(saved.blobs()) | {state.sha256}


async def test_a_living_owner_is_not_swept_by_one_who_looks(world: World, make: Make) -> None:
    await trained(world, make)
    lineage = open_lineage(make(), world.blobs, world.clock)
    lineage.save(publish=False)
    draft = lineage._store._area(lineage._store._epoch).put(b"on its way to the next save")
    LineageStore(world.blobs, "main").read()
    LineageStore(world.blobs, "main").read_owner_sign()
    assert draft.sha256 in stored(world)


async def test_equal_bytes_of_a_former_owner_are_not_ours_to_rely_on(world: World, make: Make) -> None:
    """Two owners write equal tensors, because training is deterministic. Neither may delete the blobs of the other."""
    await trained(world, make)
    first = open_lineage(make(), world.blobs, world.clock)
    second = open_lineage(make(), world.blobs, world.clock)
    same = first._store._area(first._store._epoch).put(b"the same"), second._store._area(second._store._epoch)
    ref = same[1].put(b"the same")
    first._store._area(first._store._epoch).delete(same[0])
    assert same[1].get(ref) == b"the same"


async def test_an_answer_that_got_lost_is_no_lost_save(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pointer was replaced, but the store reported an error, so the process saves again."""
    await world.run(make())
    world.bus.produce(*(experience(n, world.bus.checkpoints[0].version) for n in range(4)))
    create, failures = BlobStore.create, iter(range(3))

    def unanswered(self: BlobStore, name: str, data: bytes) -> bool:
        created = create(self, name, data)
        if name.startswith("records") and next(failures, None) is not None:
            raise Unavailable("no answer")
        return created

    monkeypatch.setattr(BlobStore, "create", unanswered)
    saved = saved_of(await world.run(make()))
    assert saved.steps == 1
    assert LineageStore(world.blobs, "main").read() == saved
    assert world.bus.fates == {(f"e{n}", 0): "trained" for n in range(4)}


async def test_a_state_of_an_earlier_release_goes_on(world: World, make: Make) -> None:
    """A lineage of an earlier release has no owner, and its blobs are in the shared area."""
    saved = await trained(world, make)
    pointer = pointer_of(world)
    assert pointer.state is not None
    for digest, epoch in pointer.epochs.items():
        ref = {**saved.blobs(), pointer.state.sha256: pointer.state}[digest]
        world.blobs.put(world.blobs.area(f"lineages/main/{epoch:010d}").get(ref))
    for name in world.blobs.areas("lineages/main"):
        world.blobs.remove_area(f"lineages/main/{name}")
    for name in world.blobs.pointers("records/lineages/main"):
        world.blobs.remove_pointer(f"records/lineages/main/{name}")
    world.blobs.set_pointer("lineages/main", LegacyPointer(state=pointer.state).model_dump_json().encode())

    assert LineageStore(world.blobs, "main").read() == saved
    again = open_lineage(make(), world.blobs, world.clock)
    assert again.saved == saved
    again.save(publish=False)
    assert Pointer.model_validate(pointer_of(world)).epoch == 1
    assert pointer.state.sha256 not in set(world.blobs.digests()), "what is superfluous goes from there too"


async def test_wrong_settings_take_nothing_over(world: World, make: Make) -> None:
    await trained(world, make)
    living = open_lineage(make(), world.blobs, world.clock)
    with pytest.raises(SettingError, match=r"trainer\.model"):
        await world.run(make(model="other"))
    living.save(publish=False)


async def test_a_trainer_that_loses_its_lineage_ends_by_name(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner changes while the trainer waits for experiences and has no save to write."""
    monkeypatch.setattr("headrace_trainer.lineage.lease._BEATS_PER_LEASE", 1000.0)
    trainer = world.trainer(make())
    polls = 0

    async def idle(experiences_max: int) -> Any:
        nonlocal polls
        polls += 1
        if polls == 3:
            owner(world.blobs)
        await asyncio.sleep(0.01)
        return []

    monkeypatch.setattr(world.source, "poll", idle)
    with pytest.raises(LineageTaken, match="lineage main belongs to elsewhere now"):
        await asyncio.wait_for(trainer.run(), 60)


async def test_a_trainer_that_stops_gives_the_lineage_up(world: World, make: Make) -> None:
    await world.run(make())
    assert LineageStore(world.blobs, "main").read_owner_sign().is_free


def test_waiting_must_be_longer_than_the_lease(make: Make) -> None:
    with pytest.raises(SettingError, match=r"trainer\.owner_wait_s = 5\.0: must be longer than lease_s"):
        make(owner_wait_s=5.0)
