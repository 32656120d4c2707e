"""The best version so far: who it is, that many small losses end at it, and what becomes of it."""

from __future__ import annotations

from headrace_registry.records import ALONE
from headrace_registry.transition import Transition
from headrace_schemas import Routing
from tests.unit.registry.rig import Rig, loaded


def level(score: float) -> dict[str, float]:
    return {"t1": score, "t2": score}


async def decided(rig: Rig, version: str, decision: str) -> None:
    async with rig.running():
        await rig.until(lambda: (decision, version) in rig.decided())


async def test_as_good_as_the_best_is_not_the_best(rig: Rig) -> None:
    first, _, third = await rig.crowned(0, 1, 2)
    model = await rig.model()
    assert (model.champion, model.anchor, model.trials) == (third, first, 2)
    assert first in [served.version for served in rig.routing.serve], "it has to be there to play"


async def test_small_losses_end_at_the_anchor(rig: Rig) -> None:
    """Ten points each: the first passes the margin of 25, the second is 20 below the anchor, where 12.5 are allowed."""
    (first,) = await rig.crowned(0)
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


async def test_whoever_is_shown_to_be_better_is_the_anchor_and_a_family_begins(rig: Rig) -> None:
    (first,) = await rig.crowned(0)
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


async def test_the_evidence_outlives_the_process(rig: Rig) -> None:
    first, _ = await rig.crowned(0, 1)
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


async def test_an_operators_word_needs_no_anchor(rig: Rig) -> None:
    await rig.crowned(0, 1)
    forced = await rig.checkpoint(2)
    record = await rig.record(forced)
    async with rig.database.transaction() as tx:
        await Transition(tx, rig.clock.now()).request(record, "force")
    await decided(rig, forced, "promoted")
    assert (await rig.model()).standing == ALONE


async def test_after_a_rollback_the_anchor_is_no_withdrawn_version_and_not_the_champion_itself(rig: Rig) -> None:
    first, second, third = await rig.crowned(0, 1, 2)
    model = await rig.model()
    async with rig.database.transaction() as tx:
        await Transition(tx, rig.clock.now()).roll_back(model, "complaints")
    model = await rig.model()
    assert (model.champion, model.anchor, model.lead) == (second, first, None)
    async with rig.database.transaction() as tx:
        await Transition(tx, rig.clock.now()).roll_back(model, "complaints")
    model = await rig.model()
    assert (model.champion, model.standing) == (first, ALONE)
    assert third not in {first, second}


async def test_a_withdrawn_anchor_is_none(rig: Rig) -> None:
    first, _, third = await rig.crowned(0, 1, 2)
    model = await rig.model()
    async with rig.database.transaction() as tx:
        await Transition(tx, rig.clock.now()).withdraw(model, first, "leaks")
    model = await rig.model()
    assert (model.champion, model.standing) == (third, ALONE)


async def test_an_anchor_that_nobody_can_serve_is_left_out(rig: Rig) -> None:
    first, second, third = await rig.crowned(0, 1, 2)
    fourth = await rig.checkpoint(3)
    await rig.ticks()
    rig.clock.elapsed_s += 1

    def replicas() -> bool:
        others = (loaded(name) for name in (second, third, fourth))
        rig.say("r1", *others, loaded(first, "failed", error="no memory"))
        return ("promoted", fourth) in rig.decided()

    async with rig.running():
        await rig.until(replicas, follow=False)
    assert rig.last("promoted").reason == f"not inferior to {third}"
    assert (await rig.model()).anchor == third


async def test_a_trial_that_was_under_way_when_the_director_stopped_is_begun_anew(rig: Rig) -> None:
    await rig.crowned(0)
    rig.gate.open.clear()
    second = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: any(version == second for version, _, _ in rig.gate.asked))
    rig.gate.open.set()
    await decided(rig, second, "promoted")
