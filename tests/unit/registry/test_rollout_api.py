"""Tests of the REST routes of rollouts: reads, changes and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.pages.rollout_api import RolloutApi
from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common, SecuritySettings
from headrace_schemas import ModelEvent
from headrace_schemas.http.catalog import WHO_HEADER
from headrace_schemas.http.registry_api import RolloutList, RolloutState
from tests.unit.registry.rig import MODEL, Rig
from tests.unit.registry.rollout_traffic import Traffic, canary_settings, steps, under_way


@pytest.fixture(autouse=True)
def _one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the salt, because with random salts some rollouts of equal versions are rolled back, as their error rate
    allows."""
    monkeypatch.setattr(steps_of_rollouts, "fresh_salt", lambda: "salt")


def client(rig: Rig, key: str = "") -> httpx2.AsyncClient:
    common = Common(data_dir=Path("unused"), security=SecuritySettings(internal_key=key))
    changes = RegistryChanges(rig.processor, rig.lease, rig.model_controller.wake.set)
    api = RolloutApi(common, rig.settings.rollout, rig.database, changes)
    transport = httpx2.ASGITransport(web.app({}, api.routes()))
    return httpx2.AsyncClient(transport=transport, base_url="http://registry", headers={WHO_HEADER: "ada"})


@pytest_asyncio.fixture
async def rig(data_dir: Path) -> AsyncIterator[Rig]:
    async with Rig(data_dir, settings=canary_settings()) as opened:
        yield opened


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_api_shows_a_rollout_with_chart_and_decisions(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    traffic = Traffic(rig, 1)
    for _ in range(3):
        await traffic.sessions(10)
        await traffic.advance(61)
    async with client(rig) as http:
        (listed,) = RolloutList.model_validate_json((await http.get("/v1/rollouts?model=m")).content).data
        assert (listed.version, listed.control, listed.phase, listed.share) == (new, old, "canary", "1/2")
        rollout_state = RolloutState.model_validate_json((await http.get(f"/v1/rollouts/{listed.id}")).content)
        assert [event.rollout.kind for event in rollout_state.decisions if event.rollout] == ["begin"]
        assert rollout_state.chart[-1].units == rollout_state.statistics["candidate_units"] > 0
        low, high = rollout_state.chart[-1].metrics["reward"][1:]
        assert low < 0 < high
        assert rollout_state.higher_is_better["missing"] is False
        assert (await http.get("/v1/rollouts?model=nobody")).json()["data"] == []
        assert code(await http.get("/v1/rollouts/nothing")) == (404, "rollout_not_found")


@pytest.mark.parametrize(
    ("how", "phase", "state"),
    [("stop", "hold", "held"), ("promote", "champion", "promoted"), ("rollback", "rolled_back", "withdrawn")],
)
async def test_api_ends_a_rollout(rig: Rig, how: str, phase: str, state: str) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    async with client(rig) as http:
        rollout = (await http.get("/v1/rollouts")).json()["data"][0]["id"]
        answer = await http.post(f"/v1/rollouts/{rollout}/{how}", json={"reason": "so it is"})
        assert RolloutState.model_validate_json(answer.content).phase == phase
        assert code(await http.post(f"/v1/rollouts/{rollout}/{how}")) == (409, "over")
    assert await rig.state(new) == state
    assert rig.routing.champion == (new if how == "promote" else old)
    assert rig.routing.split is None
    assert len(steps(rig, new)) == 2
    event = [model_event for model_event in rig.sent(ModelEvent) if model_event.version == new][-1]
    assert (event.who, event.reason) == ("ada", "so it is")


async def test_api_begins_a_rollout_once_without_a_setting(data_dir: Path) -> None:
    async with Rig(data_dir, settings=canary_settings(kind="rolling")) as rig:
        (old,) = await rig.promote_in_turn(0)
        async with rig.running():
            await rig.change(lambda transition, model: transition.pause(model, True))
            new = await rig.checkpoint(1)
        async with client(rig) as http:
            refused = await http.post(f"/v1/models/{MODEL}/rollouts", json={"version": new, "share": "2/3"})
            assert code(refused) == (400, "invalid_request")
            body = {"version": new, "kind": "ab", "share": "1/5"}
            assert (await http.post(f"/v1/models/{MODEL}/rollouts", json=body)).status_code == 202
            async with rig.running():
                await rig.until(lambda: rig.routing.split is not None)
            assert rig.routing.split is not None
            assert rig.routing.split.arms[0].share == "1/5"
            assert code(await http.post(f"/v1/models/{MODEL}/rollouts", json=body)) == (409, "canary")
            body = {"version": old}
            assert code(await http.post(f"/v1/models/{MODEL}/rollouts", json=body)) == (409, "already_champion")
        await rig.change(lambda transition, model: transition.pause(model, False))
        last = await Traffic(rig, 2).until_over(3000, 40)
        assert (last.phase, rig.routing.champion) == ("hold", old), "a fixed split changes nothing by itself"
        assert "the plan leaves it to an operator" in last.reason


async def test_api_requires_the_internal_key(rig: Rig) -> None:
    async with client(rig, "secret") as http:
        assert (await http.get("/v1/rollouts")).status_code == 401
