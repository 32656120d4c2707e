"""Tests of the version that a rollback restores, of the anchor, and of descendants of withdrawn versions.

A rollback may be repeated. The anchor bounds the sum of many small losses. Descendants of a withdrawn version never
serve.
"""

from __future__ import annotations

import random

import pytest
from sqlalchemy import select

from headrace_registry.storage import store
from headrace_registry.storage.leader import LostLeadership
from headrace_registry.storage.records import CHAMPION_IS_ANCHOR
from headrace_registry.storage.tables import CHAMPIONS
from headrace_registry.versions.lifecycle import RunTrial
from headrace_registry.versions.transition import Transition
from headrace_schemas import Routing
from tests.unit.registry.conftest import RegistryState
from tests.unit.registry.rig import MODEL, Rig, loaded
from tests.unit.registry.test_api import client
from tests.unit.registry.test_storage import lease_held_by


async def _back(registry: RegistryState) -> tuple[str | None, str | None]:
    await registry.transition.roll_back(await registry.model(), "worse")
    model = await registry.model()
    return model.champion, model.previous


async def test_rollback_target_is_the_champion_before_in_repeated_rollbacks(registry: RegistryState) -> None:
    first, second, third, _ = await registry.promote_in_turn(0, 1, 2, 3)
    assert await _back(registry) == (third, second)
    assert await _back(registry) == (second, first)
    assert await _back(registry) == (first, None)


async def test_rollback_target_skips_a_withdrawn_champion(registry: RegistryState) -> None:
    """The history of champions gives the version to restore after the previous champion was withdrawn."""
    first = await registry.add(0)
    await registry.transition.promote(await registry.model(), first, "", {})
    line = [first]
    for step in (1, 2):
        sibling = await registry.add(step)  # a sibling, not a child: withdrawing one leaves the other
        await registry.transition.promote(await registry.model(), sibling, "", {})
        line.append(sibling)
    await registry.transition.withdraw(await registry.model(), line[1], "complaints")
    assert (await registry.model()).previous == first
    assert await _back(registry) == (first, None)


async def test_rollback_target_counts_a_repeated_champion_once(registry: RegistryState) -> None:
    first, second = [await registry.add(step) for step in (0, 1)]
    for version in (first, second, first):
        await registry.transition.promote(await registry.model(), version, "", {})
    assert (await registry.model()).previous == second
    assert await _back(registry) == (second, None), "the first one is withdrawn"
    left = list((await registry.tx.execute(select(CHAMPIONS.c.version))).scalars())
    assert left == [first, second]


async def test_rollback_target_skips_a_version_that_waits_again(registry: RegistryState) -> None:
    first, second, _ = await registry.promote_in_turn(0, 1, 2)
    await registry.transition.request(await registry.version(second), "gate")
    assert await store.rollback_target(registry.tx, MODEL, (await registry.model()).champion) == first


def level(score: float) -> dict[str, float]:
    return {"t1": score, "t2": score}


async def decided(rig: Rig, version: str, decision: str) -> None:
    async with rig.running():
        await rig.until(lambda: (decision, version) in rig.decided())


async def test_anchor_stays_when_an_equal_version_is_promoted(rig: Rig) -> None:
    first, _, third = await rig.promote_in_turn(0, 1, 2)
    model = await rig.model()
    assert (model.champion, model.anchor, model.trials) == (third, first, 2)
    assert first in [served.version for served in rig.routing.serve], "it has to be there to play"


async def test_anchor_bounds_the_sum_of_small_losses(rig: Rig) -> None:
    """Two versions each lose 10 points: the first is within the margin of 25, but the second is 20 points below the
    anchor.

    The margin to the anchor is 12.5 points.
    """
    (first,) = await rig.promote_in_turn(0)
    rig.gate.scores[first] = level(0.9)
    second = await rig.checkpoint(1)
    rig.gate.scores[second] = level(0.8)
    await decided(rig, second, "promoted")
    third = await rig.checkpoint(2)
    rig.gate.scores[third] = level(0.7)
    await decided(rig, third, "rejected")
    rejected = rig.last("rejected")
    assert rejected.reason == f"inferior to the anchor {first}"
    assert rejected.statistics["anchor_margin"] == 0.125
    assert round(rejected.statistics["anchor_difference"], 6) == -0.2
    assert rig.routing.aliases == {"champion": second, "previous": first}


async def test_anchor_moves_to_a_better_version_and_starts_a_family(rig: Rig) -> None:
    (first,) = await rig.promote_in_turn(0)
    rig.gate.scores[first] = level(0.2)
    second = await rig.checkpoint(1)
    rig.gate.scores[second] = level(0.9)
    await decided(rig, second, "promoted")
    assert (await rig.model()).anchor == first, "less than 25 points worse is seen sooner than better"
    for step in range(2, 12):
        version = await rig.checkpoint(step)
        rig.gate.scores[version] = level(0.9)
        await decided(rig, version, "promoted")
        if (await rig.model()).anchor != first:
            break
    model = await rig.model()
    assert model.anchor in {None, second, *(event.version for event in rig.sent(Routing)[-1].serve)} - {first}
    assert model.trials <= 1


async def test_anchor_evidence_survives_a_restart(rig: Rig) -> None:
    first, _ = await rig.promote_in_turn(0, 1)
    before = await rig.model()
    assert before.lead is not None
    rig.boot()
    await rig.lease.acquire()
    third = await rig.checkpoint(2)
    rig.gate.scores[third] = level(0.0)
    await decided(rig, third, "rejected")
    after = await rig.model()
    assert (after.anchor, after.trials) == (first, 2)
    assert after.lead != before.lead, "what champion and anchor played counts for the champion"


async def test_anchor_is_cleared_by_a_forced_promotion(rig: Rig) -> None:
    await rig.promote_in_turn(0, 1)
    forced = await rig.checkpoint(2)
    record = await rig.record(forced)
    async with rig.database.transaction() as tx:
        await Transition(tx, rig.clock.now()).request(record, "force")
    await decided(rig, forced, "promoted")
    assert (await rig.model()).anchor_state == CHAMPION_IS_ANCHOR


async def test_anchor_after_a_rollback_is_neither_withdrawn_nor_the_champion(rig: Rig) -> None:
    first, second, third = await rig.promote_in_turn(0, 1, 2)
    model = await rig.model()
    async with rig.database.transaction() as tx:
        await Transition(tx, rig.clock.now()).roll_back(model, "complaints")
    model = await rig.model()
    assert (model.champion, model.anchor, model.lead) == (second, first, None)
    async with rig.database.transaction() as tx:
        await Transition(tx, rig.clock.now()).roll_back(model, "complaints")
    model = await rig.model()
    assert (model.champion, model.anchor_state) == (first, CHAMPION_IS_ANCHOR)
    assert third not in {first, second}


async def test_anchor_is_cleared_when_it_is_withdrawn(rig: Rig) -> None:
    first, _, third = await rig.promote_in_turn(0, 1, 2)
    model = await rig.model()
    async with rig.database.transaction() as tx:
        await Transition(tx, rig.clock.now()).withdraw(model, first, "leaks")
    model = await rig.model()
    assert (model.champion, model.anchor_state) == (third, CHAMPION_IS_ANCHOR)


async def test_anchor_without_a_replica_is_left_out_of_the_trial(rig: Rig) -> None:
    first, second, third = await rig.promote_in_turn(0, 1, 2)
    fourth = await rig.checkpoint(3)
    await rig.ticks()
    rig.clock.elapsed_s += 1

    def replicas() -> bool:
        loaded_versions = (loaded(name) for name in (second, third, fourth))
        rig.report("r1", *loaded_versions, loaded(first, "failed", error="no memory"))
        return ("promoted", fourth) in rig.decided()

    async with rig.running():
        await rig.until(replicas, follow=False)
    assert rig.last("promoted").reason == f"not inferior to {third}"
    assert (await rig.model()).anchor == third


async def test_trial_begins_again_after_the_controller_stopped(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    rig.gate.open.clear()
    second = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: any(version == second for version, _, _ in rig.gate.requests))
    rig.gate.open.set()
    await decided(rig, second, "promoted")


async def chain(rig: Rig, length: int) -> list[str]:
    """Promote `length` versions in order, each trained from the previous one, and return them."""
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


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
async def test_withdrawn_versions_never_serve_in_random_trees(rig: Rig, seed: int) -> None:
    """In random trees of versions and rollbacks, no version with a withdrawn ancestor has a role."""
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
