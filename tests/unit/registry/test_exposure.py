"""Tests of the REST routes of rollouts, and of the limit on users that an insufficiently tested version may serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from pydantic import ValidationError

from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.control.rollout_reports import ReportWriter
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.pages.rollout_api import RolloutApi
from headrace_registry.rollouts.plan import RolloutPlan, RolloutStage
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common, SecuritySettings
from headrace_schemas import ModelEvent
from headrace_schemas.http.catalog import WHO_HEADER
from headrace_schemas.http.registry_api import RolloutList, RolloutState
from headrace_schemas.rules.assignment import assign_unit
from tests.unit.registry.rig import MODEL, Rig
from tests.unit.registry.rollout_traffic import Traffic, canary_settings, steps, under_way
from tests.unit.registry.test_versions import post

RAMP = (RolloutStage(share=Fraction(1, 10), units_min=5), RolloutStage(share=Fraction(1, 2)))


@pytest.fixture(autouse=True)
def _one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the salt, so that the assignment to arms depends only on the seed."""
    monkeypatch.setattr(steps_of_rollouts, "new_salt", lambda: "salt")


@pytest_asyncio.fixture
async def ramp_rig(data_dir: Path) -> AsyncIterator[Rig]:
    async with Rig(data_dir, settings=canary_settings(stages=RAMP, exposure_max=Fraction(1, 10))) as opened:
        yield opened


def test_loss_to_rule_out_equals_a_computation_by_hand() -> None:
    """With `exposure_max` 1/10, a share of 1/5 requires that a loss of 1/2 is ruled out, and a share of 1/2 a loss
    of 1/5."""
    plan = RolloutPlan(exposure_max=Fraction(1, 10))
    assert plan.loss_to_rule_out(Fraction(1, 100)) is None
    assert plan.loss_to_rule_out(Fraction(1, 10)) is None
    assert plan.loss_to_rule_out(Fraction(1, 5)) == Fraction(1, 2)
    assert plan.loss_to_rule_out(Fraction(1, 2)) == Fraction(1, 5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "canary", "exposure_max": "1/200"}, "the first of stages has 1/100"),
        ({"kind": "canary", "split": "adaptive", "unit": "user"}, "would move users"),
    ],
)
def test_rollout_settings_refuse_contradictions(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RolloutSettings.model_validate(settings)


async def test_share_grows_only_after_its_loss_is_ruled_out(ramp_rig: Rig) -> None:
    """A few good sessions are not enough evidence, even if `units_min` allows the next stage."""
    await ramp_rig.promote_in_turn(0)
    new = await under_way(ramp_rig)
    traffic = Traffic(ramp_rig, 1)
    await traffic.sessions(100)
    await traffic.advance(61)
    last = await traffic.last()
    assert last.statistics["candidate_units"] >= 5
    assert steps(ramp_rig, new) == ["begin"]
    while "advance" not in steps(ramp_rig, new):
        assert len(traffic.served) < 4000
        await traffic.sessions(40)
        await traffic.advance(61)
    assert (await traffic.last()).statistics["candidate_units"] > 30
    assert steps(ramp_rig, new)[:2] == ["begin", "advance"]


async def test_harmful_version_gets_its_first_share_at_most(ramp_rig: Rig) -> None:
    await ramp_rig.promote_in_turn(0)
    new = await under_way(ramp_rig)
    traffic = Traffic(ramp_rig, 3)
    traffic.rewards[new] = 0.2
    last = await traffic.until_over(4000, 40)
    assert (last.phase, steps(ramp_rig, new)) == ("rolled_back", ["begin", "roll_back"])
    met = sum(version == new for _, version in traffic.served) / len(traffic.served)
    assert met < 0.13
    assert last.statistics["exposure"] == pytest.approx(met, abs=0.03), "as counted before the last look"


async def test_exposure_counts_turns_once_by_answering_version(ramp_rig: Rig) -> None:
    (old,) = await ramp_rig.promote_in_turn(0)
    new = await under_way(ramp_rig)
    traffic = Traffic(ramp_rig, 2)
    await traffic.sessions(60)
    last = await traffic.last()
    mine = sum(version == new for _, version in traffic.served)
    assert mine > 0
    assert (last.turns, last.turns_exposed) == (60, mine)
    key, version = next(served_turn for served_turn in traffic.served if served_turn[1] == new)
    await ramp_rig.process_events(traffic.turn(key, version, None))
    assert (await traffic.last()).turns == 60, "a turn that no split has drawn is no part of it"
    drawn = assign_unit(traffic.split, old, key)[1]
    turn = traffic.turn(key, old, drawn)  # no replica had the candidate ready
    await ramp_rig.process_events(turn, turn)
    last = await traffic.last()
    assert (last.turns, last.turns_exposed) == (61, mine)


@pytest.mark.parametrize("experiences", ["keep", "exclude"])
async def test_rollback_event_states_whether_experiences_are_excluded(data_dir: Path, experiences: str) -> None:
    async with Rig(data_dir, settings=canary_settings(experiences=experiences)) as ramp_rig:
        await ramp_rig.promote_in_turn(0)
        new = await under_way(ramp_rig)
        traffic = Traffic(ramp_rig, 1)
        traffic.rewards[new] = 0.1
        await traffic.until_over()
        (event,) = [
            model_event
            for model_event in ramp_rig.sent(ModelEvent)
            if model_event.rollout and model_event.rollout.kind == "roll_back"
        ]
        assert event.rollout is not None
        assert (event.version, event.rollout.excludes) == (new, experiences == "exclude")


async def test_stop_leaves_the_champion_alone(ramp_rig: Rig) -> None:
    (old,) = await ramp_rig.promote_in_turn(0)
    new = await under_way(ramp_rig)
    state = await post(ramp_rig, "stop", reason="an incident")
    assert state.paused
    assert served(ramp_rig) == [old]
    assert await ramp_rig.state(new) == "held"
    assert steps(ramp_rig, new) == ["begin", "hold"]
    assert ramp_rig.last("skipped").reason == "an incident"
    newer = await ramp_rig.checkpoint(2)
    ramp_rig.follow()
    await ramp_rig.ticks(5)
    assert await ramp_rig.state(newer) == "registered"
    await post(ramp_rig, "resume")
    async with ramp_rig.running():
        await ramp_rig.until(lambda: served(ramp_rig) == [old, newer])


async def test_check_after_updates_delays_versions_without_a_request(data_dir: Path) -> None:
    async with Rig(data_dir, settings=canary_settings(check_after_updates=3)) as ramp_rig:
        await ramp_rig.promote_in_turn(0)
        first, second = await ramp_rig.checkpoint(1), await ramp_rig.checkpoint(2)
        ramp_rig.follow()
        await ramp_rig.ticks(5)
        assert [await ramp_rig.state(name) for name in (first, second)] == ["registered"] * 2
        third = await ramp_rig.checkpoint(3)
        async with ramp_rig.running():
            await ramp_rig.until(lambda: served(ramp_rig)[1:] == [third])
        assert await ramp_rig.state(first) == "skipped"


def served(ramp_rig: Rig) -> list[str | None]:
    """Return the champion and the candidates in a rollout."""
    split = ramp_rig.routing.split
    return [ramp_rig.routing.champion, *(arm.version for arm in (split.arms if split else ()))]


async def test_reports_draw_each_step_and_delete_the_oldest(data_dir: Path) -> None:
    pytest.importorskip("matplotlib")
    ramp_rig = Rig(data_dir, settings=canary_settings())
    folder = data_dir / "pictures"
    ramp_rig.reports = ReportWriter(folder, 2)
    ramp_rig.boot()
    await ramp_rig.start()
    try:
        await ramp_rig.promote_in_turn(0)
        new = await under_way(ramp_rig)
        traffic = Traffic(ramp_rig, 1)
        traffic.rewards[new] = 0.1
        await traffic.until_over()
        await ramp_rig.ticks(1)
        file_names = sorted(path.name for path in folder.iterdir())
        assert [name.rpartition("-")[2] for name in file_names] == ["begin.png", "roll_back.png"]
        assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in file_names)
        ramp_rig.boot()
        await ramp_rig.lease.acquire()
        await under_way(ramp_rig, 2)
        await ramp_rig.ticks(1)
        assert len(list(folder.iterdir())) == 2, "the newest reports stay"
    finally:
        await ramp_rig.database.close()


async def test_gauges_exist_while_a_rollout_is_under_way(ramp_rig: Rig) -> None:
    await ramp_rig.promote_in_turn(0)
    new = await under_way(ramp_rig)
    traffic = Traffic(ramp_rig, 1)
    traffic.rewards[new] = 0.0
    await traffic.sessions(120)
    await traffic.advance(61)
    where = {"model": MODEL, "slot": "0"}
    assert REGISTRY.get_sample_value("headrace_registry_rollout_share", where) == 0.1
    assert REGISTRY.get_sample_value("headrace_registry_rollout_exposure", where) == pytest.approx(0.1, abs=0.07)
    lower = {**where, "metric": "reward", "end": "lower"}
    assert (REGISTRY.get_sample_value("headrace_registry_rollout_difference", lower) or 0) < 0
    assert (REGISTRY.get_sample_value("headrace_registry_rollout_harm", {**where, "metric": "reward"}) or 0) > 0
    await traffic.until_over(4000, 40)
    await ramp_rig.ticks(1)
    assert REGISTRY.get_sample_value("headrace_registry_rollout_share", where) is None
    ended = {"model": MODEL, "kind": "roll_back"}
    assert (REGISTRY.get_sample_value("headrace_registry_rollout_steps_total", ended) or 0) >= 1


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
