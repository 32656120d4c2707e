"""Pins and pauses: an operator holds a model still."""

from __future__ import annotations

import pytest

from headrace_schemas.http.registry_api import ModelState
from tests.unit.registry.rig import MODEL, Rig
from tests.unit.registry.test_api import client, error


async def post(rig: Rig, action: str, status: int = 200, **body: object) -> ModelState:
    async with client(rig) as http:
        answer = await http.post(f"/v1/models/{MODEL}/{action}", json=body)
    assert answer.status_code == status, answer.text
    rig.model_controller.wake.set()
    return ModelState.model_validate_json(answer.content)


async def test_pin_keeps_the_champion_until_it_is_removed(rig: Rig) -> None:
    (champion,) = await rig.promote_in_turn(0)
    assert (await post(rig, "pin", reason="the fair")).pinned == champion
    assert rig.routing.pinned == champion
    newer, newest = await rig.checkpoint(1), await rig.checkpoint(2)
    rig.follow()
    await rig.ticks(5)
    assert rig.routing.aliases == {"champion": champion}
    assert [served.version for served in rig.routing.serve] == [champion], "nothing is loaded in vain"
    await post(rig, "unpin")
    async with rig.running():
        await rig.until(lambda: ("promoted", newest) in rig.decided())
    assert await rig.state(newer) == "skipped"
    assert rig.routing.pinned is None


async def test_pin_and_pause_release_the_candidate(rig: Rig) -> None:
    (champion,) = await rig.promote_in_turn(0)
    rig.gate.open.clear()
    candidate = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: candidate in rig.gate.players)
        await post(rig, "pause")
        await rig.until(lambda: rig.gate.cancelled == [{champion, candidate}])
        assert await rig.state(candidate) == "registered"
        assert rig.routing.paused
        rig.gate.open.set()
        await post(rig, "resume")
        await rig.until(lambda: ("promoted", candidate) in rig.decided())
    assert rig.routing.aliases == {"champion": candidate, "previous": champion}


async def test_pin_promotes_another_version_after_its_probe(rig: Rig) -> None:
    old, new = await rig.promote_in_turn(0, 1)
    rig.gate.scores[old] = {"t1": 0.0, "t2": 0.0}
    state = await post(rig, "pin", version=old)
    assert (state.champion, state.pinned) == (new, old)
    async with rig.running():
        await rig.until(lambda: rig.routing.champion == old)
        later = await rig.checkpoint(2)
        await rig.ticks(0)
    await rig.ticks(3)
    assert await rig.state(later) == "registered"


async def test_requested_version_moves_during_a_pause_but_not_a_pin(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    await post(rig, "pause")
    requested = await rig.checkpoint(1)
    await post(rig, "promote", 202, version=requested)
    async with rig.running():
        await rig.until(lambda: rig.routing.champion == requested)
    await post(rig, "pin")
    other = await rig.checkpoint(2)
    async with client(rig) as http:
        answer = await http.post(f"/v1/models/{MODEL}/promote", json={"version": other, "force": True})
    assert error(answer) == (409, "pinned")


async def test_rollback_removes_the_pin_of_the_withdrawn_version(rig: Rig) -> None:
    old, new = await rig.promote_in_turn(0, 1)
    await post(rig, "pin")
    assert (await post(rig, "rollback")).pinned is None
    assert rig.routing.aliases == {"champion": old}
    async with client(rig) as http:
        assert error(await http.post(f"/v1/models/{MODEL}/pin", json={"version": new})) == (409, "withdrawn")


async def test_rollback_keeps_the_pin_of_another_version(rig: Rig) -> None:
    old, _ = await rig.promote_in_turn(0, 1)
    await post(rig, "pin", version=old)
    assert (await post(rig, "rollback")).pinned == old


@pytest.mark.parametrize("action", ["pause", "resume", "unpin"])
async def test_repeated_hold_request_changes_nothing(rig: Rig, action: str) -> None:
    await rig.promote_in_turn(0)
    first = await post(rig, action)
    assert await post(rig, action) == first


async def test_pin_is_refused_without_a_champion(rig: Rig) -> None:
    await rig.checkpoint(0)
    async with client(rig) as http:
        assert error(await http.post(f"/v1/models/{MODEL}/pin")) == (409, "no_champion")


async def test_holds_survive_a_restart(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    await post(rig, "pause")
    rig.boot()
    await rig.lease.acquire()
    await rig.checkpoint(1)
    await rig.ticks(3)
    assert [d for d in rig.decided() if d[0] == "promoted"] == [("promoted", rig.routing.champion)]
