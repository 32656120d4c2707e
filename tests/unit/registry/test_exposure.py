"""Tests of the limit on users that an insufficiently tested version may serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from pydantic import ValidationError

from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.control.rollout_reports import ReportWriter
from headrace_registry.rollouts.plan import RolloutPlan, RolloutStage
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_schemas import ModelEvent
from headrace_schemas.rules.assignment import assign_unit
from tests.unit.registry.rig import MODEL, Rig
from tests.unit.registry.rollout_traffic import Traffic, canary_settings, steps, under_way
from tests.unit.registry.test_versions import post

RAMP = (RolloutStage(share=Fraction(1, 10), units_min=5), RolloutStage(share=Fraction(1, 2)))


@pytest.fixture(autouse=True)
def _one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the salt, so that the assignment to arms depends only on the seed."""
    monkeypatch.setattr(steps_of_rollouts, "fresh_salt", lambda: "salt")


@pytest_asyncio.fixture
async def rig(data_dir: Path) -> AsyncIterator[Rig]:
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


async def test_share_grows_only_after_its_loss_is_ruled_out(rig: Rig) -> None:
    """A few good sessions are not enough evidence, even if `units_min` allows the next stage."""
    await rig.promote_in_turn(0)
    new = await under_way(rig)
    traffic = Traffic(rig, 1)
    await traffic.sessions(100)
    await traffic.advance(61)
    last = await traffic.last()
    assert last.statistics["candidate_units"] >= 5
    assert steps(rig, new) == ["begin"]
    while "advance" not in steps(rig, new):
        assert len(traffic.served) < 4000
        await traffic.sessions(40)
        await traffic.advance(61)
    assert (await traffic.last()).statistics["candidate_units"] > 30
    assert steps(rig, new)[:2] == ["begin", "advance"]


async def test_harmful_version_gets_its_first_share_at_most(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    new = await under_way(rig)
    traffic = Traffic(rig, 3)
    traffic.rewards[new] = 0.2
    last = await traffic.until_over(4000, 40)
    assert (last.phase, steps(rig, new)) == ("rolled_back", ["begin", "roll_back"])
    met = sum(version == new for _, version in traffic.served) / len(traffic.served)
    assert met < 0.13
    assert last.statistics["exposure"] == pytest.approx(met, abs=0.03), "as counted before the last look"


async def test_exposure_counts_turns_once_by_answering_version(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    traffic = Traffic(rig, 2)
    await traffic.sessions(60)
    last = await traffic.last()
    mine = sum(version == new for _, version in traffic.served)
    assert mine > 0
    assert (last.turns, last.turns_exposed) == (60, mine)
    key, version = next(served_turn for served_turn in traffic.served if served_turn[1] == new)
    await rig.process_events(traffic.turn(key, version, None))
    assert (await traffic.last()).turns == 60, "a turn that no split has drawn is no part of it"
    drawn = assign_unit(traffic.split, old, key)[1]
    turn = traffic.turn(key, old, drawn)  # no replica had the candidate ready
    await rig.process_events(turn, turn)
    last = await traffic.last()
    assert (last.turns, last.turns_exposed) == (61, mine)


@pytest.mark.parametrize("experiences", ["keep", "exclude"])
async def test_rollback_event_states_whether_experiences_are_excluded(data_dir: Path, experiences: str) -> None:
    async with Rig(data_dir, settings=canary_settings(experiences=experiences)) as rig:
        await rig.promote_in_turn(0)
        new = await under_way(rig)
        traffic = Traffic(rig, 1)
        traffic.rewards[new] = 0.1
        await traffic.until_over()
        (event,) = [
            model_event
            for model_event in rig.sent(ModelEvent)
            if model_event.rollout and model_event.rollout.kind == "roll_back"
        ]
        assert event.rollout is not None
        assert (event.version, event.rollout.excludes) == (new, experiences == "exclude")


async def test_stop_leaves_the_champion_alone(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    state = await post(rig, "stop", reason="an incident")
    assert state.paused
    assert served(rig) == [old]
    assert await rig.state(new) == "held"
    assert steps(rig, new) == ["begin", "hold"]
    assert rig.last("skipped").reason == "an incident"
    newer = await rig.checkpoint(2)
    rig.follow()
    await rig.ticks(5)
    assert await rig.state(newer) == "registered"
    await post(rig, "resume")
    async with rig.running():
        await rig.until(lambda: served(rig) == [old, newer])


async def test_check_after_updates_delays_versions_without_a_request(data_dir: Path) -> None:
    async with Rig(data_dir, settings=canary_settings(check_after_updates=3)) as rig:
        await rig.promote_in_turn(0)
        first, second = await rig.checkpoint(1), await rig.checkpoint(2)
        rig.follow()
        await rig.ticks(5)
        assert [await rig.state(name) for name in (first, second)] == ["registered"] * 2
        third = await rig.checkpoint(3)
        async with rig.running():
            await rig.until(lambda: served(rig)[1:] == [third])
        assert await rig.state(first) == "skipped"


def served(rig: Rig) -> list[str | None]:
    """Return the champion and the candidates in a rollout."""
    split = rig.routing.split
    return [rig.routing.champion, *(arm.version for arm in (split.arms if split else ()))]


async def test_reports_draw_each_step_and_delete_the_oldest(data_dir: Path) -> None:
    pytest.importorskip("matplotlib")
    rig = Rig(data_dir, settings=canary_settings())
    folder = data_dir / "pictures"
    rig.reports = ReportWriter(folder, 2)
    rig.boot()
    await rig.start()
    try:
        await rig.promote_in_turn(0)
        new = await under_way(rig)
        traffic = Traffic(rig, 1)
        traffic.rewards[new] = 0.1
        await traffic.until_over()
        await rig.ticks(1)
        file_names = sorted(path.name for path in folder.iterdir())
        assert [name.rpartition("-")[2] for name in file_names] == ["begin.png", "roll_back.png"]
        assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in file_names)
        rig.boot()
        await rig.lease.acquire()
        await under_way(rig, 2)
        await rig.ticks(1)
        assert len(list(folder.iterdir())) == 2, "the newest reports stay"
    finally:
        await rig.database.close()


async def test_gauges_exist_while_a_rollout_is_under_way(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    new = await under_way(rig)
    traffic = Traffic(rig, 1)
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
    await rig.ticks(1)
    assert REGISTRY.get_sample_value("headrace_registry_rollout_share", where) is None
    ended = {"model": MODEL, "kind": "roll_back"}
    assert (REGISTRY.get_sample_value("headrace_registry_rollout_steps_total", ended) or 0) >= 1
