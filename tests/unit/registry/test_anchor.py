"""The anchor: which version it is, the bound on many small losses, and its end."""

from __future__ import annotations

from headrace_registry.storage.records import CHAMPION_IS_ANCHOR
from headrace_registry.versions.transition import Transition
from headrace_schemas import Routing
from tests.unit.registry.rig import Rig, loaded


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
    """Ten points each: the first passes the margin of 25, the second is 20 below the anchor, where 12.5 are allowed."""
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
