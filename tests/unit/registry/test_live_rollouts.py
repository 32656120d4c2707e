"""Tests of rollouts on live traffic, from the gate to promotion, hold or rollback."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import select

from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.rollouts import metrics
from headrace_registry.rollouts.metrics import Compute, Metric
from headrace_registry.rollouts.plan import RolloutStage
from headrace_registry.storage.tables import EVENTS, READINGS
from headrace_registry.versions.transition import Transition
from headrace_schemas import DeadLetter, ModelEvent, Routing
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values import ids
from tests.support.turns import feedback
from tests.unit.registry.rig import Rig
from tests.unit.registry.rollout_traffic import HALF, Traffic, canary_settings, steps, under_way


@pytest.fixture(autouse=True)
def _one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the salt, so that the assignment to arms depends only on the seed.

    With random salts, one in twenty rollouts of an equal version may be rolled back.
    """
    monkeypatch.setattr(steps_of_rollouts, "new_salt", lambda: "salt")


@pytest_asyncio.fixture
async def rig(data_dir: Path) -> AsyncIterator[Rig]:
    async with Rig(data_dir, settings=canary_settings()) as opened:
        yield opened


async def test_rollout_begins_with_the_second_version(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    assert rig.routing.aliases == {"champion": old, "canary": new}
    assert rig.routing.split is not None
    assert [(arm.version, arm.share) for arm in rig.routing.split.arms] == [(new, "1/2")]
    assert await rig.state(new) == "canary"
    assert (await rig.model()).candidate is None, "the gate is free for the next one"
    assert steps(rig, new) == ["begin"]


async def test_rollout_of_a_worse_version_is_rolled_back_with_its_children(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    street = Traffic(rig, 1)
    street.rewards[new] = 0.2
    last = await street.until_over()
    child = await rig.checkpoint(2, parent=new)
    await rig.ticks()
    assert (last.phase, await rig.state(new)) == ("rolled_back", "withdrawn")
    assert "harm: reward" in last.reason
    assert steps(rig, new) == ["begin", "roll_back"]
    assert rig.routing.split is None
    assert rig.routing.aliases == {"champion": old}
    assert new in rig.routing.withdrawn
    assert await rig.state(child) == "withdrawn"
    decided = rig.last("withdrawn")
    event = next(
        model_event
        for model_event in rig.sent(ModelEvent)
        if model_event.rollout and model_event.rollout.kind == "roll_back"
    )
    assert decided.version == child
    assert event.statistics["candidate_units"] > 5
    assert event.statistics["reward.difference"] < -0.2


@pytest.mark.parametrize("reward", [0.7, 0.95])
async def test_rollout_of_an_equal_version_is_promoted(rig: Rig, reward: float) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    street = Traffic(rig, 2)
    street.rewards[new] = reward
    last = await street.until_over()
    assert (last.phase, last.reason) == ("champion", "reward not inferior; every guardrail not inferior")
    assert rig.routing.aliases == {"champion": new, "previous": old}
    assert rig.routing.split is None
    assert steps(rig, new) == ["begin", "promote"]
    assert await rig.state(new) == "promoted"


async def test_rollout_share_grows_by_stages(data_dir: Path) -> None:
    stages = tuple(RolloutStage(share=Fraction(1, part), units_min=10) for part in (10, 4, 2))
    async with Rig(data_dir, settings=canary_settings(stages=stages)) as rig:
        await rig.promote_in_turn(0)
        new = await under_way(rig)
        street = Traffic(rig, 3)
        await street.until_over(4000, 40)
        shares = [routing.split.arms[0].share for routing in rig.sent(Routing) if routing.split]
        assert shares == ["1/10", "1/4", "1/2"]
        assert steps(rig, new) == ["begin", "advance", "advance", "promote"]


async def test_rollout_at_units_max_is_held_and_can_be_requested_again(data_dir: Path) -> None:
    async with Rig(data_dir, settings=canary_settings(units_max=10)) as rig:
        (old,) = await rig.promote_in_turn(0)
        new = await under_way(rig)
        last = await Traffic(rig, 4).until_over()
        assert (last.phase, await rig.state(new)) == ("hold", "held")
        assert "units_max = 10" in last.reason
        assert rig.last("skipped").version == new
        assert rig.routing.champion == old
        child = await under_way(rig, 2, new)
        assert child, "a hold says nothing against it, so its children have their turn"


async def test_readings_are_taken_once_in_the_order_of_arrival(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    await under_way(rig)
    street = Traffic(rig, 5)
    early = await street.sessions(3)
    await street.advance(30)
    late = await street.sessions(3)
    await street.advance(31)
    assert {unit for _, unit, _ in await street.readings()} == set(early)
    rig.boot()
    await rig.lease.acquire()
    await rig.processor.recover()
    await street.advance(31)
    await street.advance(31)
    units = [unit for _, unit, _ in await street.readings()]
    assert units == [*sorted(early), *sorted(late)]


async def test_closing_reading_uses_feedback_up_to_the_closing_age(
    data_dir: Path,
) -> None:
    async with Rig(data_dir, settings=canary_settings(closing_s=120.0)) as rig:
        await rig.promote_in_turn(0)
        await under_way(rig)
        street = Traffic(rig, 6)
        (key,) = await street.sessions(1, rewarded=False)
        await rig.process_events(street.reward(key, 1.0))
        await street.advance(61)
        await rig.process_events(street.reward(key, 0.25, revision=1))
        await street.advance(61)
        await rig.process_events(street.reward(key, 0.0, revision=2))
        await street.advance(61)
        async with rig.database.transaction() as tx:
            readings = [json.loads(row.found) for row in await tx.execute(select(READINGS).order_by(READINGS.c.id))]
        assert [(estimate["reward"], estimate["missing"]) for estimate in readings] == [(1.0, 0.0), (0.25, 0.0)]


async def test_record_read_twice_counts_once(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    await under_way(rig)
    street = Traffic(rig, 7)
    (key,) = await street.sessions(1)
    unit = rig._offset
    rig._offset = unit - 2  # the same places again, as after a crash between effect and acknowledgement
    champion = rig.routing.champion
    assert champion
    await rig.process_events(street.reward(key, 1.0))
    assert await street.units() == [key]


async def test_share_does_not_grow_without_metric_values(data_dir: Path) -> None:
    """Without rewards, the absence of harm is not evidence."""
    stages = (RolloutStage(share=Fraction(1, 4), units_min=5), RolloutStage(share=Fraction(1, 2)))
    async with Rig(data_dir, settings=canary_settings(stages=stages)) as rig:
        await rig.promote_in_turn(0)
        new = await under_way(rig)
        street = Traffic(rig, 16)
        for _ in range(5):
            await street.sessions(20, rewarded=False)
            await street.advance(61)
        assert steps(rig, new) == ["begin"]
        for _ in range(2):
            await street.sessions(20)
            await street.advance(61)
        assert "advance" in steps(rig, new)


async def test_sessions_outside_the_arms_are_not_stored(data_dir: Path) -> None:
    async with Rig(data_dir, settings=canary_settings(stages=(RolloutStage(share=Fraction(1, 100)),))) as rig:
        await rig.promote_in_turn(0)
        await under_way(rig)
        street = Traffic(rig, 8)
        await street.sessions(200)
        assert len(await street.units()) < 20


async def test_rollback_of_the_champion_holds_its_canary(rig: Rig) -> None:
    old, champion = await _two(rig)
    new = await under_way(rig, 2)
    async with rig.database.transaction() as tx:
        transition = Transition(tx, rig.clock.now(), "ada")
        await transition.roll_back(await rig.model_in(tx), "complaints")
        events = await transition.finish()
    assert (await Traffic(rig, 9).last()).phase == "hold"
    assert await rig.state(new) == "held"
    (routing,) = [event for event in events if isinstance(event, Routing)]
    assert (routing.champion, routing.split) == (old, None)
    assert champion in routing.withdrawn
    assert {event.who for event in events if isinstance(event, ModelEvent)} == {"ada"}


async def test_pin_holds_the_canary_and_pause_stops_its_growth(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    street = Traffic(rig, 10)
    await rig.change(lambda transition, model: transition.pause(model, True))
    for _ in range(15):
        await street.sessions(20)
        await street.advance(61)
    assert steps(rig, new) == ["begin"]
    await rig.change(lambda transition, model: transition.pin(model, old))
    await street.advance(1)
    assert (await street.last()).reason == f"the model is pinned to {old}"


async def test_canary_refused_by_all_replicas_is_held(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    rig.heartbeat("r1", **{old: "ready", new: "failed"})
    await rig.model_controller.tick()
    assert "no replica can serve it" in (await Traffic(rig, 11).last()).reason


async def test_rollouts_per_hour_are_limited(data_dir: Path) -> None:
    async with Rig(data_dir, settings=canary_settings(versions_per_hour_max=1, units_max=10)) as rig:
        await rig.promote_in_turn(0)
        await under_way(rig)
        street = Traffic(rig, 12)
        await street.until_over()
        waiting = await rig.checkpoint(2)
        await rig.ticks()
        assert await rig.state(waiting) == "registered"
        rig.clock.elapsed_s += 3601
        async with rig.running():
            await rig.until(lambda: rig.routing.split is not None)
        assert await rig.state(waiting) == "canary"


async def test_rollout_waits_until_traffic_is_read(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    rig.watching = False
    new = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: len(rig.gate.runs) >= 2 and not rig.model_controller._runner._runs)
    await rig.ticks(5)
    assert await rig.state(new) == "evaluating"
    assert rig.routing.champion == old
    assert rig.routing.split is None


async def test_promotion_of_one_candidate_holds_the_other(data_dir: Path) -> None:
    async with Rig(data_dir, settings=canary_settings(slots=2, stages=HALF)) as rig:
        await rig.promote_in_turn(0)
        first = await under_way(rig, 1)
        second = await under_way(rig, 2)
        assert rig.routing.split is not None
        assert [(arm.version, arm.slot, arm.share) for arm in rig.routing.split.arms] == [
            (first, 0, "1/3"),
            (second, 1, "1/3"),
        ]
        street = Traffic(rig, 13)
        street.rewards[first] = 1.0
        street.rewards[second] = 0.6
        while steps(rig, first)[-1] == "begin":
            assert len(street.served) < 4000
            await street.sessions(30)
            await street.advance(61)
        assert steps(rig, first)[-1] == "promote"
        assert steps(rig, second)[-1] in ("hold", "roll_back"), "what it was compared with serves no more"


@pytest.mark.parametrize(
    ("compute", "reason"), [(lambda session: 1 / 0, "ZeroDivisionError"), (lambda session: float("nan"), "finite")]
)
async def test_failed_metric_holds_its_rollout_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, compute: Compute, reason: str
) -> None:
    await rig.promote_in_turn(0)
    broken = Metric(compute, higher_is_better=True, bounds=(0.0, 1.0))
    # Who leads a rollout keeps what it finds at its first tick, so this comes before it begins.
    monkeypatch.setattr(metrics, "metric_named", lambda _name: broken)
    await under_way(rig)
    await rig.model_controller.tick()
    street = Traffic(rig, 14)
    await street.sessions(2)
    await street.advance(61)
    last = await street.last()
    assert last.phase == "hold"
    assert reason in last.reason


async def test_sessions_of_a_user_are_one_unit_within_the_window(data_dir: Path) -> None:
    async with Rig(data_dir, settings=canary_settings(unit="user", window_s=30.0)) as rig:
        await rig.promote_in_turn(0)
        await under_way(rig)
        street = Traffic(rig, 15)
        user = ids.session_key("default", "user:ada")
        version, assignment = assign_unit(street.split, rig.routing.champion or "", user)
        keys = [ids.session_key("default", f"run {number}") for number in range(3)]
        for key, value, wait_s in zip(keys, (1.0, 0.0, 0.5), (20, 20, 60), strict=True):
            await rig.process_events(street.turn(key, version, assignment), street.reward(key, value))
            await street.advance(wait_s)
        assert await street.units() == [user]
        async with rig.database.transaction() as tx:
            (reading,) = [json.loads(row.found) for row in await tx.execute(select(READINGS))]
        assert reading["reward"] == 0.5, "the mean of the two sessions of the window; the third came later"


async def _two(rig: Rig) -> tuple[str, str]:
    """Return the previous champion and the champion."""
    (old,) = await rig.promote_in_turn(0)
    new = await under_way(rig)
    await Traffic(rig, 20).until_over()
    assert rig.routing.champion == new
    return old, new


async def test_unit_ignores_events_of_other_tenants_and_forged_sources(rig: Rig) -> None:
    """Events of another tenant with the same session id, and forged reserved sources, are neither stored nor
    counted."""
    await rig.promote_in_turn(0)
    await under_way(rig)
    street = Traffic(rig, 1)
    (key,) = await street.sessions(1, rewarded=False)
    foreign = feedback(session_key=key, tenant="b", value=0.0)
    accepted = feedback(session_key=key, value=1.0)
    forged = street.reward(key, 0.0, revision=7)
    sources = ("function:answer", "judge:helpfulness", "learned:thumbs", "feedback", "feedback:tone", "Judge：x")
    for source in sources:
        for producer in ("unknown", "headrace/collector", "headrace/judge2", "agent"):
            await rig.process_events(
                forged.model_copy(update={"source": source, "trajectory_id": producer}), producer=producer
            )
    await rig.process_events(forged.model_copy(update={"tenant": "b"}), foreign)
    assert await _stored_rows(rig) == {"turns": 1}
    assert {letter.reason for letter in rig.sent(DeadLetter)} == {"reserved_source"}
    assert len(rig.sent(DeadLetter)) == 4 * len(sources)
    await rig.process_events(accepted, street.reward(key, 1.0))
    assert await _stored_rows(rig) == {"turns": 1, "feedback": 1, "rewards": 1}


async def _stored_rows(rig: Rig) -> dict[str, int]:
    """Return the number of stored events by topic."""
    async with rig.database.transaction() as tx:
        return dict(Counter((await tx.execute(select(EVENTS.c.topic))).scalars()))
