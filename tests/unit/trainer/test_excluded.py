"""An excluded version's answers are not trained, and are removed from the weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headrace_schemas import ModelEvent, RolloutStep
from headrace_trainer.trainer import Trainer
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World, decision, experience


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def taken_back(version: str, previous: str, *, excludes: bool = True) -> ModelEvent:
    step = RolloutStep(rollout_id="r", kind="roll_back", stage=0, share="0", excludes=excludes)
    return decision(version, "withdrawn", previous).model_copy(update={"rollout": step})


def held_advantage(trainer: Trainer, number: int) -> float:
    """Return the sum of an experience's advantages that the weights hold."""
    assert trainer.lineage is not None
    state = trainer.lineage.state
    entry = state.window.get(f"e{number}")
    assert entry is not None
    return math.fsum(contribution.advantage for contribution in entry.held_contributions(state.history, state.steps))


async def beside(world: World, make: Make) -> tuple[str, str]:
    """The champion, and a version on live traffic that the weights do not descend from: the gate had refused it."""
    settings = make(max_staleness=9)
    await world.run(settings)
    champion = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, champion, reward=n % 3) for n in range(4)))
    await world.run(settings)
    canary = world.bus.checkpoints[1].version
    world.bus.produce(decision(canary, "rejected", champion))
    await world.run(settings)
    return champion, canary


async def test_what_was_trained_of_it_is_taken_back_and_the_rest_is_dropped(world: World, make: Make) -> None:
    settings = make(max_staleness=9)
    champion, canary = await beside(world, make)
    world.bus.produce(*(experience(n, canary, reward=n % 3) for n in range(20, 24)))
    before = await world.run(settings)
    assert [held_advantage(before, n) != 0 for n in range(20, 24)].count(True) >= 3
    before_others = [held_advantage(before, n) for n in range(4)]

    world.bus.produce(taken_back(canary, champion), experience(30, canary, reward=2.0))
    after = await world.run(settings, wait_s=31)
    assert {world.bus.fates[f"e{n}", 0] for n in (*range(20, 24), 30)} == {"excluded"}
    assert [held_advantage(after, n) for n in range(20, 24)] == pytest.approx([0.0] * 4, abs=1e-6)
    assert [held_advantage(after, n) for n in range(4)] == before_others, "the champion's stay"
    verdicts = {(verdict.dropped, verdict.detail) for verdict in world.bus.verdicts if verdict.detail == "excluded"}
    assert verdicts == {("withdrawn", "excluded")}, "a reason that older readers know"

    world.bus.produce(experience(20, canary, reward=9.0, revision=1), experience(31, canary, reward=1.0))
    later = await world.run(settings, wait_s=31)
    assert {world.bus.fates[key] for key in (("e20", 1), ("e31", 0))} == {"excluded"}, "after a restart, too"
    assert held_advantage(later, 20) == pytest.approx(0.0, abs=1e-6)


async def test_what_waits_is_dropped(world: World, make: Make) -> None:
    champion, canary = await beside(world, make)
    world.bus.produce(*(experience(n, canary) for n in range(20, 22)))
    world.bus.produce(taken_back(canary, champion))
    await world.run(make(max_staleness=9))
    assert {world.bus.fates[f"e{n}", 0] for n in (20, 21)} == {"excluded"}


async def test_weights_that_go_back_have_lost_it_and_do_not_learn_it_again(world: World, make: Make) -> None:
    """A harmful ancestor of the trained version is refused: the champion's experiences wait again, its own do not."""
    settings = make(max_staleness=9)
    await world.run(settings)
    champion = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, champion, reward=n % 3) for n in range(4)))
    await world.run(settings)
    canary = world.bus.checkpoints[1].version
    world.bus.produce(*(experience(n, canary, reward=n % 3) for n in range(20, 24)))
    await world.run(settings)
    world.bus.produce(taken_back(canary, champion))
    trainer = await world.run(make(max_staleness=9, batch_experiences=64))
    assert {world.bus.fates[f"e{n}", 0] for n in range(4)} == {"queued"}
    assert {world.bus.fates[f"e{n}", 0] for n in range(20, 24)} == {"undone"}
    assert [held_advantage(trainer, n) for n in range(20, 24)] == [0.0] * 4


@pytest.mark.parametrize("ends", ["kept", "promoted"])
async def test_without_the_setting_or_after_a_promotion_it_is_trained(world: World, make: Make, ends: str) -> None:
    champion, canary = await beside(world, make)
    world.bus.produce(taken_back(canary, champion, excludes=ends == "promoted"))
    if ends == "promoted":
        world.bus.produce(decision(canary, "promoted", champion))
    world.bus.produce(*(experience(n, canary, reward=n % 3) for n in range(20, 24)))
    await world.run(make(max_staleness=9))
    assert {world.bus.fates[f"e{n}", 0] for n in range(20, 24)} == {"trained"}


async def test_what_is_too_old_to_be_trained_stays(world: World, make: Make) -> None:
    """P5 comes before: a correction is a training, too."""
    champion, canary = await beside(world, make)
    world.bus.produce(*(experience(n, canary, reward=n % 3) for n in range(20, 24)))
    before = await world.run(make(max_staleness=9))
    stale = [held_advantage(before, n) for n in range(20, 24)]
    world.bus.produce(taken_back(canary, champion))
    after = await world.run(make(max_staleness=0), wait_s=31)
    assert [held_advantage(after, n) for n in range(20, 24)] == stale
    assert {world.bus.fates[f"e{n}", 0] for n in range(20, 24)} == {"trained"}, "the account says what the weights hold"
