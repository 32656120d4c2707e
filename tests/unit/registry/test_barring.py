"""Descendants of a withdrawn version never serve."""

from __future__ import annotations

import random

import pytest

from headrace_registry.storage.leader import LostLeadership
from headrace_registry.versions.lifecycle import RunTrial
from tests.unit.registry.rig import MODEL, Rig, loaded
from tests.unit.registry.test_api import client
from tests.unit.registry.test_leader import lease_held_by


async def chain(rig: Rig, length: int) -> list[str]:
    """Versions that were trained one from the other, each promoted in turn."""
    line: list[str] = []
    async with rig.running():
        for step in range(length):
            version = await rig.checkpoint(step, parent=line[-1] if line else None)
            await rig.until(lambda version=version: ("evaluated", version) in rig.decided())  # type: ignore[misc]
            line.append(version)
    return line


async def roll_back(rig: Rig) -> None:
    rig.follow()
    async with client(rig) as http:
        answer = await http.post(f"/v1/models/{MODEL}/rollback", json={"reason": "users complain"})
    assert answer.status_code == 200, answer.text


async def test_withdrawal_includes_a_waiting_child(rig: Rig) -> None:
    _, bad = await chain(rig, 2)
    child = await rig.checkpoint(2, parent=bad)
    await roll_back(rig)
    assert rig.last("withdrawn").version == child
    assert rig.last("withdrawn").reason == f"it descends from {bad}, which was withdrawn"
    await rig.ticks()
    assert set(rig.routing.withdrawn) == {bad, child}


async def test_withdrawal_ends_the_trial_of_a_child(rig: Rig) -> None:
    good, bad = await chain(rig, 2)
    rig.gate.open.clear()
    child = await rig.checkpoint(2, parent=bad)
    async with rig.running():
        await rig.until(lambda: child in rig.gate.players)
        await roll_back(rig)
        rig.model_controller.wake.set()
        await rig.until(lambda: rig.gate.cancelled == [{good, bad, child}])
        rig.gate.open.set()
        await rig.ticks()
    assert rig.routing.aliases == {"champion": good}
    assert [served.version for served in rig.routing.serve] == [good]


async def test_child_of_a_withdrawn_version_is_withdrawn_on_arrival(rig: Rig) -> None:
    good, bad = await chain(rig, 2)
    await roll_back(rig)
    child = await rig.checkpoint(2, parent=bad)
    grandchild = await rig.checkpoint(3, parent=child)
    fresh = await rig.checkpoint(4, parent=good)
    assert [await rig.state(name) for name in (child, grandchild)] == ["withdrawn", "withdrawn"]
    event = rig.last("withdrawn")
    assert (event.version, event.previous) == (grandchild, good), "the trainer hears where to go on"
    async with rig.running():
        await rig.until(lambda: ("promoted", fresh) in rig.decided())
    assert rig.routing.aliases == {"champion": fresh, "previous": good}


async def test_rollback_keeps_a_descendant_that_becomes_champion(rig: Rig) -> None:
    old, new = await chain(rig, 2)
    async with client(rig) as http, rig.running():
        await http.post(f"/v1/models/{MODEL}/promote", json={"version": old})
        await rig.until(lambda: rig.routing.champion == old)
    child = await rig.checkpoint(2, parent=new)
    await roll_back(rig)
    assert rig.routing.champion == new
    assert rig.routing.withdrawn == (old,)
    async with rig.running():
        await rig.until(lambda: ("promoted", child) in rig.decided())


async def test_withdrawal_of_a_champions_ancestor_includes_other_children(rig: Rig) -> None:
    old, champion = await chain(rig, 2)
    rig.gate.configured = False
    other, child_of_champion = await rig.checkpoint(2, parent=old), await rig.checkpoint(3, parent=champion)
    async with client(rig) as http:
        await http.post(f"/v1/models/{MODEL}/withdraw", json={"version": old})
    assert set(rig.routing.withdrawn) == {old, other}
    assert rig.routing.aliases == {"champion": champion}
    async with rig.running():
        await rig.until(lambda: ("promoted", child_of_champion) in rig.decided())


async def test_previous_is_never_a_withdrawn_version(rig: Rig) -> None:
    first, second, third = await chain(rig, 3)
    async with client(rig) as http:
        await http.post(f"/v1/models/{MODEL}/withdraw", json={"version": first})
    await roll_back(rig)
    assert rig.routing.aliases == {"champion": second}, "whom it had replaced was withdrawn"
    assert set(rig.routing.withdrawn) == {first, third}


async def test_automatic_rollback_withdraws_descendants(rig: Rig) -> None:
    good, bad = await chain(rig, 2)
    child = await rig.checkpoint(2, parent=bad)
    rig.report("r1", loaded(good), loaded(bad, "failed", error="no memory"))
    await rig.ticks()
    assert rig.routing.aliases == {"champion": good}
    assert await rig.state(child) == "withdrawn"


@pytest.mark.parametrize("seed", range(6))
async def test_withdrawn_versions_never_serve_in_random_trees(rig: Rig, seed: int) -> None:
    """Whatever grows and whatever is rolled back: no version with a withdrawn ancestor has a role."""
    rng = random.Random(seed)
    rig.gate.configured = False
    parents: dict[str, str | None] = {(await rig.checkpoint(0)): None}
    withdrawn: set[str] = set()
    for step in range(1, 15):
        parent = rng.choice([*parents])
        parents[await rig.checkpoint(step, parent=parent)] = parent
        for _ in range(3):
            rig.follow()
            await rig.ticks(1)
        if rng.random() < 0.4 and rig.routing.aliases.get("previous"):
            withdrawn.add(rig.routing.aliases["champion"])
            heir = rig.routing.aliases["previous"]
            await roll_back(rig)
            assert rig.routing.champion == heir
        for role, name in rig.routing.aliases.items():
            assert name not in withdrawn, (seed, role)
        candidate = {served.version for served in rig.routing.serve} - set(rig.routing.aliases.values())
        for name in candidate:
            assert parents[name] not in rig.routing.withdrawn, seed


async def test_former_leader_cannot_store_a_gate_result(rig: Rig) -> None:
    await chain(rig, 1)
    version = await rig.checkpoint(1)
    await rig.ticks(1)
    rig.gate.open.clear()
    rig.follow()
    await rig.ticks(2)
    await rig.until(lambda: version in rig.gate.players, follow=False)
    await lease_held_by(rig, "elsewhere:1:x")
    rig.gate.open.set()
    with pytest.raises(LostLeadership):
        await rig.model_controller._runner._runs[MODEL, RunTrial].task
    assert ("evaluated", version) not in rig.decided()
