"""P5 on every path: on arrival, while it waits, when the batch is built, after a restart, and for corrections."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_trainer.batches.prepare import prepare
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World, decision, experience


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def aged(world: World, make: Make, versions: int = 3, **settings: object) -> str:
    """A lineage with `versions` steps behind it; the base's version."""
    await world.run(make(**settings))
    first = world.bus.checkpoints[0].version
    for turn in range(versions):
        newest = world.bus.checkpoints[-1].version
        world.bus.produce(*(experience(100 * turn + n, newest, reward=n % 3) for n in range(50, 54)))
        await world.run(make(**settings))
    assert len(world.bus.checkpoints) == versions + 1
    return first


async def test_on_arrival(world: World, make: Make) -> None:
    first = await aged(world, make, max_staleness=2)
    world.bus.produce(experience(1, first), experience(2, world.bus.checkpoints[1].version))
    await world.run(make(max_staleness=2))
    assert world.bus.fates["e1", 0] == "stale"
    assert ("e2", 0) not in world.bus.fates, "two versions behind is not too old"


async def test_an_unknown_version_is_foreign(world: World, make: Make) -> None:
    await aged(world, make, 1)
    world.bus.produce(experience(1, "m@ffffffffffff"))
    await world.run(make())
    assert world.bus.fates["e1", 0] == "foreign_version"


async def test_while_it_waits(world: World, make: Make) -> None:
    """One lonely run waits for its group while others move the weights on."""
    settings = make(max_staleness=1, advantage={"kind": "grpo"}, group_size=2)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    world.bus.produce(experience(1, first, task="lonely", run="0"))
    for turn in range(3):
        newest = world.bus.checkpoints[-1].version
        world.bus.produce(*(experience(10 * turn + n, newest, n, task=f"t{turn}", run=str(n)) for n in range(10, 14)))
        await world.run(settings)
        assert world.bus.fates.get(("e1", 0)) == (None if turn == 0 else "stale")


async def test_after_a_restart(world: World, make: Make) -> None:
    """The bound may have been lowered, or the state be older than the queue, so admitted experiences are checked
    again."""
    first = await aged(world, make, 2, max_staleness=9)
    world.bus.produce(experience(1, first), experience(2, first, reward=None))
    await world.run(make(max_staleness=9))
    lineage = open_lineage(make(max_staleness=1), world.blobs, world.clock)
    assert [item.experience.experience_id for item in lineage.state.waiting] == ["e1"]
    assert lineage.next_batch() == ()
    assert lineage.state.waiting == ()
    assert [(v.experience_id, v.dropped) for v in lineage.state.outcomes] == [("e1", "stale")]


async def test_a_correction_of_something_too_old(world: World, make: Make) -> None:
    first = await aged(world, make, 1, max_staleness=1)
    del first
    trained = next(verdict.experience_id for verdict in world.bus.verdicts)
    await more(world, make)
    number = int(trained[1:])
    world.bus.produce(experience(number, world.bus.checkpoints[0].version, -5.0, revision=1))
    await world.run(make(max_staleness=1))
    assert world.bus.fates[trained, 1] == "stale"


async def more(world: World, make: Make) -> None:
    newest = world.bus.checkpoints[-1].version
    world.bus.produce(*(experience(900 + n, newest, reward=n % 3) for n in range(4)))
    await world.run(make(max_staleness=1))


async def test_nothing_is_trained_when_all_would_be_dropped(world: World, make: Make) -> None:
    first = await aged(world, make, 3, max_staleness=2)
    world.bus.produce(*(experience(n, first) for n in range(8)))
    await world.run(make(max_staleness=2))
    assert len(world.bus.checkpoints) == 4
    assert [world.bus.fates[f"e{n}", 0] for n in range(8)] == ["stale"] * 8


async def test_the_trainer_cannot_run_ahead_of_what_is_served(world: World, make: Make) -> None:
    """If the served version never moves, training stops by itself once the bound is reached."""
    await world.run(make(max_staleness=2))
    first = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, first, reward=n % 3) for n in range(40)))
    await world.run(make(max_staleness=2))
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1, 2, 3]
    assert list(world.bus.fates.values()) == ["trained"] * 12 + ["stale"] * 28


async def test_going_back_makes_the_champions_experiences_fresh_again(world: World, make: Make) -> None:
    first = await aged(world, make, 3, max_staleness=2)
    second = world.bus.checkpoints[1].version
    world.bus.produce(decision(second, "rejected", first), experience(1, first), experience(2, second))
    await world.run(make(max_staleness=2, batch_experiences=64), per_poll=1)
    assert ("e1", 0) not in world.bus.fates
    assert ("e2", 0) not in world.bus.fates


async def test_the_batch_itself_refuses_what_is_too_old(world: World, make: Make) -> None:
    """The same property in another place: a batch with a stale experience cannot be built."""
    first = await aged(world, make, 2, max_staleness=9)
    world.bus.produce(*(experience(n, first) for n in range(3)), experience(9, first, reward=None))
    await world.run(make(max_staleness=9))
    lineage: Lineage = open_lineage(make(max_staleness=1), world.blobs, world.clock)
    settings = make().advantage
    with pytest.raises(AssertionError, match="P5"):
        prepare(lineage.state.waiting, lineage.state, settings, lineage._decay)
