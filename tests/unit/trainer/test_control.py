"""Tests of the effects of the registry's decisions on the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace_trainer.lineage.control import ControlPlan, plan_control
from headrace_trainer.trainer import Trainer
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_history import chain, name, publish
from tests.unit.trainer.world import World, decision, experience, optimizer_of, policy_of


def course(
    decision_kind: str, number: int, *, head: int = 5, previous: int | None = None, promoted: str = "20"
) -> ControlPlan:
    history = chain(head)
    event = decision(name(number), decision_kind, None if previous is None else name(previous))  # type: ignore[arg-type]
    return plan_control(event, history, tuple(name(int(digit)) for digit in promoted))


def of(promoted: str, rewind: int | None = None) -> ControlPlan:
    return ControlPlan(tuple(name(int(digit)) for digit in promoted), None if rewind is None else name(rewind))


@pytest.mark.parametrize("decision_kind", ["registered", "probed", "evaluated", "skipped"])
def test_most_decisions_change_nothing(decision_kind: str) -> None:
    assert course(decision_kind, 4) == of("20")


def test_a_promotion_on_the_line_moves_the_champion_and_no_weights() -> None:
    assert course("promoted", 4) == of("42")
    assert course("promoted", 2) == of("20")


@pytest.mark.parametrize("decision_kind", ["rejected", "rolled_back", "withdrawn"])
def test_a_refusal_goes_back_to_the_version_that_it_names(decision_kind: str) -> None:
    assert course(decision_kind, 4, previous=2) == of("20", rewind=2)
    assert course(decision_kind, 4, previous=0) == of("02", rewind=0)


def test_a_refusal_that_names_none_of_ours_goes_back_to_the_champion() -> None:
    assert course("rejected", 4) == of("20", rewind=2)
    assert course("rejected", 4, previous=9) == of("20", rewind=2)


def test_a_champion_that_is_refused_gives_way_to_the_one_before_it() -> None:
    assert course("rolled_back", 2) == of("0", rewind=0)


def test_children_of_a_refused_champion_are_no_champions_to_go_back_to() -> None:
    assert course("rolled_back", 2, promoted="42", head=5) == of("1", rewind=1), "4 holds what 2 learned"


def test_a_champion_that_the_registry_names_serves_whatever_became_of_its_parent() -> None:
    assert course("withdrawn", 2, previous=4, promoted="42") == of("4", rewind=4)


def test_a_champion_that_takes_over_from_a_stranger_is_ours_again() -> None:
    assert course("rolled_back", 9, previous=0, promoted="20") == of("02")


def test_the_base_has_nothing_to_go_back_to() -> None:
    assert course("withdrawn", 0, promoted="0", head=2) == of("0", rewind=0)


def test_a_refused_version_that_the_weights_do_not_hold_changes_nothing() -> None:
    history = publish(chain(3), 4, 4).rewind(name(3), 4)
    assert plan_control(decision(name(4), "rejected"), history, (name(3),)).rewind_to is None


def test_another_lines_champion_is_followed() -> None:
    history = publish(chain(3), 4, 4).rewind(name(3), 4)
    assert plan_control(decision(name(4), "promoted"), history, (name(3),)) == ControlPlan((name(4), name(3)), name(4))


def test_versions_of_others_are_nobody_here() -> None:
    assert course("rejected", 9) == of("20")
    assert course("promoted", 9) == of("20")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.lineage is not None
    return policy_of(trainer.lineage).tensors()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.long)])
async def test_weights_and_optimizer_go_back_and_the_next_version_is_the_champions_child(
    world: World, make: Make, rank: int
) -> None:
    settings = make(max_staleness=9, lora={"rank": rank})
    base = await world.run(settings)
    first = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, first, reward=n % 3) for n in range(4)))
    result = await world.run(settings)
    second = world.bus.checkpoints[1].version
    world.bus.produce(decision(second, "promoted", first))
    world.bus.produce(*(experience(n, first, reward=n % 3) for n in range(10, 18)))
    three = await world.run(settings)
    assert len(world.bus.checkpoints) == 4
    assert not same(weights(three), weights(result))

    world.bus.produce(decision(world.bus.checkpoints[2].version, "rejected", second))
    back = await world.run(make(max_staleness=9, lora={"rank": rank}, batch_experiences=64))
    assert same(weights(back), weights(result))
    assert not same(weights(back), weights(base))
    assert list(world.bus.fates.values()) == ["trained"] * 4 + ["queued"] * 8, "and they wait again"
    assert back.lineage is not None
    assert back.lineage.state.steps == 3, "what was read and trained stays on the account"
    assert optimizer_of(back.lineage).updates == 1

    world.bus.produce(*(experience(n, first, reward=n % 3) for n in range(20, 24)))
    await world.run(settings)
    newest = world.bus.checkpoints[4]
    assert (newest.step, newest.parent) == (4, second), "a new number, and the champion's child"
    assert list(world.bus.fates.values()) == ["trained"] * 16, "nothing twice in the same weights"


@pytest.mark.parametrize("decision_kind", [pytest.param("rolled_back", marks=pytest.mark.long), "withdrawn"])
async def test_children_of_a_withdrawn_champion_are_not_built_on(world: World, make: Make, decision_kind: str) -> None:
    """Two child versions were published before the rollback was known. The registry refuses each of them."""
    settings = make(max_staleness=20)
    base = await world.run(settings)
    first = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, first, reward=n % 3) for n in range(4)))
    await world.run(settings)
    champion = world.bus.checkpoints[1].version
    world.bus.produce(decision(champion, "promoted", first))
    world.bus.produce(*(experience(n, champion, reward=n % 3) for n in range(10, 18)))
    await world.run(settings)
    children = [checkpoint.version for checkpoint in world.bus.checkpoints[2:]]
    assert len(children) == 2

    world.bus.produce(decision(champion, decision_kind, first, number=1))  # type: ignore[arg-type]
    back = await world.run(make(max_staleness=20, batch_experiences=64))
    assert same(weights(back), weights(base))
    for number, child in enumerate(children):
        world.bus.produce(decision(child, "rejected", first, number=10 + number))
    world.bus.produce(*(experience(n, first, reward=n % 3) for n in range(20, 24)))
    await world.run(settings)
    newest = world.bus.checkpoints[4]
    assert (newest.step, newest.parent) == (4, first)


@pytest.mark.long
async def test_a_champion_is_never_starved_by_refusals(world: World, make: Make) -> None:
    """After ten refused versions the champion's experiences are still fresh, because staleness is counted on the
    tree (P5)."""
    settings = make(max_staleness=1)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    for turn in range(10):
        world.bus.produce(*(experience(10 * turn + n, first, reward=n % 3) for n in range(4)))
        await world.run(settings)
        world.bus.produce(decision(world.bus.checkpoints[-1].version, "rejected", first, number=turn))
        await world.run(settings)
    assert set(world.bus.fates.values()) <= {"trained", "undone"}, "nothing is stale"
    assert [checkpoint.parent for checkpoint in world.bus.checkpoints].count(first) >= 10


async def test_what_a_refusal_undoes_is_trained_again_once(world: World, make: Make) -> None:
    """If a newer revision has arrived since, it is the one that is queued."""
    settings, waits = make(max_staleness=1, batch_experiences=4), make(max_staleness=1, batch_experiences=64)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, first, reward=float(n % 2), task="t", run=str(n)) for n in range(4)))
    result = await world.run(settings)
    assert result.lineage is not None
    before = {name: entry.contributions for name, entry in result.lineage.state.window.copy().items()}
    world.bus.produce(decision(world.bus.checkpoints[-1].version, "rejected", first))
    back = await world.run(waits)
    assert world.bus.fates == dict.fromkeys([(f"e{n}", 0) for n in range(4)], "queued")
    assert back.lineage is not None
    assert len(back.lineage.state.waiting) == 4

    again = await world.run(settings)
    assert set(world.bus.fates.values()) == {"trained"}
    assert same(weights(again), weights(result)), "the same experiences on the same weights, by the same baselines"
    assert again.lineage is not None
    for one_of, entry in again.lineage.state.window.copy().items():
        assert [c.advantage for c in entry.contributions] == [c.advantage for c in before[one_of] * 2]

    world.bus.produce(decision(world.bus.checkpoints[-1].version, "rejected", first, number=1))
    await world.run(settings)
    assert set(world.bus.fates.values()) == {"undone"}, "not a third time"


async def test_weights_that_come_forward_hold_again_what_was_undone(world: World, make: Make) -> None:
    """A refused version is promoted later: its experiences count as trained again and leave the queue."""
    settings, waits = make(max_staleness=9), make(max_staleness=9, batch_experiences=64)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, first, reward=float(n % 2)) for n in range(4)))
    result = await world.run(settings)
    second = world.bus.checkpoints[1].version
    world.bus.produce(decision(second, "rejected", first))
    await world.run(waits)
    assert set(world.bus.fates.values()) == {"queued"}
    world.bus.produce(experience(0, first, reward=0.5, revision=1))
    world.bus.produce(decision(second, "promoted", first, number=1))
    back = await world.run(waits)
    assert same(weights(back), weights(result))
    assert back.lineage is not None
    assert [item.experience.experience_id for item in back.lineage.state.waiting] == ["e0"], "the word that came since"
    assert world.bus.fates == {(f"e{n}", 0): "trained" for n in range(4)}


async def test_a_word_that_came_too_late_for_a_refused_version_gets_its_chance(world: World, make: Make) -> None:
    """The experience was dropped as stale, but is fresh for the champion after the rollback."""
    settings = make(max_staleness=1)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    for turn in range(2):
        world.bus.produce(*(experience(10 * turn + n, first, reward=float(n % 2)) for n in range(4)))
        await world.run(settings)
    world.bus.produce(experience(0, first, reward=1.0, revision=1))
    await world.run(settings)
    assert world.bus.fates["e0", 1] == "stale"
    world.bus.produce(decision(world.bus.checkpoints[1].version, "rejected", first))
    await world.run(make(max_staleness=1, batch_experiences=64))
    assert (world.bus.fates["e0", 0], world.bus.fates["e0", 1]) == ("undone", "queued")


async def test_what_is_too_old_or_was_taken_back_is_not_queued_again(world: World, make: Make) -> None:
    settings = make(max_staleness=1)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, first, reward=float(n % 2), task="t", run=str(n)) for n in range(4)))
    await world.run(settings)
    second = world.bus.checkpoints[1].version
    world.bus.produce(decision(second, "promoted", first))
    old = (experience(n, first, reward=float(n % 2), task="t", run=str(n)) for n in (10, 11))
    world.bus.produce(*old, *(experience(n, second, reward=float(n % 2), task="t", run=str(n)) for n in (12, 13)))
    await world.run(settings)
    third = world.bus.checkpoints[2].version
    world.bus.produce(experience(13, second, None, revision=1, branch=False))
    await world.run(settings, wait_s=31)
    world.bus.produce(decision(third, "rejected", second, number=1))
    await world.run(make(max_staleness=1, batch_experiences=64))
    fates = {name: outcome for name, outcome in world.bus.fates.items() if name[0] in {"e10", "e12", "e13"}}
    assert fates == {("e10", 0): "queued", ("e12", 0): "queued", ("e13", 0): "undone", ("e13", 1): "undone"}

    world.bus.produce(decision(second, "rolled_back", first, number=2))
    await world.run(make(max_staleness=0, batch_experiences=64))
    assert {world.bus.fates[f"e{n}", 0] for n in range(4)} == {"queued"}, "sampled by the weights as they are now"


async def test_a_version_without_a_restore_point_is_taken_from_its_files(world: World, make: Make) -> None:
    settings = make(max_staleness=20, memory={"restore_points": 3})
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    stored = None
    for turn in range(6):
        world.bus.produce(*(experience(10 * turn + n, first, reward=n % 3) for n in range(4)))
        trainer = await world.run(settings)
        stored = weights(trainer) if turn == 1 else stored
    target = world.bus.checkpoints[2].version
    assert trainer.lineage is not None
    assert target not in trainer.lineage.saved.restore_points
    world.bus.produce(decision(world.bus.checkpoints[3].version, "rolled_back", target))
    back = await world.run(make(max_staleness=20, memory={"restore_points": 3}, batch_experiences=64))
    assert stored is not None
    assert same(weights(back), stored)
    assert back.lineage is not None
    assert optimizer_of(back.lineage).updates == 0, "its momentum is gone, and that is said in the log"


async def test_other_models_decisions_are_passed_over(world: World, make: Make) -> None:
    await world.run(make())
    first = world.bus.checkpoints[0].version
    event = decision(first, "rejected").model_copy(update={"model": "other"})
    world.bus.produce(event)
    trainer = await world.run(make())
    assert trainer.lineage is not None
    assert trainer.lineage.state.promoted == (first,)
