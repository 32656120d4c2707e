"""Tests of rollouts with a shadow: sampled prompts, decisions, remaining rows, and crashes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import select

from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.rollouts.metrics import SessionRecord
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_registry.storage import unit_store
from headrace_registry.storage.tables import EVENTS, READINGS, SESSIONS, UNITS
from headrace_schemas import ModelEvent, UnitAssignment
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values import ids
from tests.unit.registry.rig import Rig
from tests.unit.registry.rollout_traffic import SHADOW, FakeAnswers, ShadowTraffic, begin_shadow, shadow_settings, steps


@pytest.fixture(autouse=True)
def _one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_of_rollouts, "new_salt", lambda: "salt")


async def opened(folder: Path, url: str = "sqlite", **changes: object) -> tuple[Rig, FakeAnswers]:
    answers = FakeAnswers()
    rig = Rig(folder, url, shadow_settings(**changes), answers)  # type: ignore[arg-type]
    answers.rig = rig
    return rig, answers


@pytest_asyncio.fixture
async def shadow(data_dir: Path) -> AsyncIterator[tuple[Rig, FakeAnswers]]:
    rig, answers = await opened(data_dir)
    await rig.start()
    yield rig, answers
    await rig.database.close()


async def test_shadow_precedes_the_first_traffic(shadow: tuple[Rig, FakeAnswers]) -> None:
    rig, answers = shadow
    (old,) = await rig.promote_in_turn(0)
    new = await begin_shadow(rig)
    traffic = ShadowTraffic(rig, 1)
    first, before = await traffic.last(), rig.routing
    assert first.phase == "shadow"
    assert before.split is None, "no user has it"
    assert new in {served.version for served in rig.routing.serve}, "replicas hold it"
    await traffic.until_canary()
    last = await traffic.last()
    assert (last.phase, last.stage, steps(rig, new)) == ("canary", 0, ["begin", "advance"])
    assert {version for _, version, _ in answers.answered} == {old, new}
    assert rig.routing.split is not None
    event = next(
        model_event
        for model_event in rig.sent(ModelEvent)
        if model_event.rollout and model_event.rollout.kind == "advance"
    )
    assert event.statistics["shadow.pairs"] >= 20
    assert "no harm in 2" in (event.reason or "")
    assert last.shadow.state is not None
    assert last.shadow.expected["reward"]
    await traffic.until_over()


async def test_shadow_parses_events_beside_the_event_loop(
    shadow: tuple[Rig, FakeAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, threads = unit_store.session_records, set[threading.Thread]()

    def note_thread(events: Sequence[tuple[str, bytes]]) -> list[SessionRecord]:
        threads.add(threading.current_thread())
        return parse(events)

    monkeypatch.setattr(unit_store, "session_records", note_thread)
    rig, _ = shadow
    await rig.promote_in_turn(0)
    await begin_shadow(rig)
    await ShadowTraffic(rig, 1).until_canary()
    assert threads
    assert threading.main_thread() not in threads, "a unit may have 64 MB of events"


async def test_shadow_answers_each_prompt_once_and_ends_its_sessions(
    shadow: tuple[Rig, FakeAnswers],
) -> None:
    rig, answers = shadow
    await rig.promote_in_turn(0)
    await begin_shadow(rig)
    traffic = ShadowTraffic(rig, 2)
    await traffic.until_canary()
    of = [of for _, _, of in answers.answered]
    assert all(of.count(original) == 2 for original in of)
    assert len({session for session, _, _ in answers.answered}) == len(answers.answered)
    async with rig.database.transaction() as tx:
        for table in (SESSIONS, UNITS, EVENTS):
            assert (await tx.execute(select(table))).all() == []
    assert await traffic.readings() == [], "no reading of a canary was made of it"


async def test_shadow_holds_a_worse_version_before_traffic(shadow: tuple[Rig, FakeAnswers]) -> None:
    rig, answers = shadow
    rig.settings = shadow_settings(units=200)
    rig.boot()
    await rig.lease.acquire()
    await rig.promote_in_turn(0)
    new = await begin_shadow(rig)
    answers.rewards[new] = 0.0
    traffic = ShadowTraffic(rig, 3)
    await traffic.until_canary()
    last = await traffic.last()
    assert (last.phase, await rig.state(new)) == ("rolled_back", "withdrawn")
    assert "harm: reward at shadow" in last.reason
    assert last.shadow.state is not None
    assert not any(routing.split for routing in rig.sent(type(rig.routing)))


@pytest.mark.parametrize(
    "fields",
    [
        {"purpose": "eval"},
        {"tenant": "others"},
        {"shadow_of": "a" * 16},
        {"delivered": False},
        {"version": "m@aaaaaaaaaaaa"},
        {"assignment": UnitAssignment(rollouts=("r",), arm="control", unit="u", propensity="1/2")},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_shadow_stores_no_prompt_that_may_not_be_sampled(
    shadow: tuple[Rig, FakeAnswers], fields: dict[str, object]
) -> None:
    rig, answers = shadow
    await rig.promote_in_turn(0)
    await begin_shadow(rig)
    traffic = ShadowTraffic(rig, 4)
    await traffic.visit(5, feedback_value=1.0, **fields)
    await traffic.advance(61)
    await rig.answered()
    assert await traffic.prompts() == []
    async with rig.database.transaction() as tx:
        assert (await tx.execute(select(EVENTS))).all() == []
    assert answers.answered == []


async def test_shadow_bounds_prompts_in_rate_and_cost(data_dir: Path) -> None:
    rig, _ = await opened(data_dir, shadow={**SHADOW, "prompts_per_minute": 2, "tokens_max": 10})
    await rig.start()
    try:
        await rig.promote_in_turn(0)
        await begin_shadow(rig)
        traffic = ShadowTraffic(rig, 5)
        await traffic.visit(10)
        assert len(await traffic.prompts()) == 1
        await traffic.advance(30)
        await traffic.visit(10)
        assert len(await traffic.prompts()) == 2
        for _ in range(10):
            await traffic.advance(60)
            await rig.answered()
            await traffic.visit(10)
        assert sum(int(str(prompt["tokens"])) for prompt in await traffic.prompts()) >= 10
        assert len(await traffic.prompts()) <= 5, "each costs 2 for its prompts and 20 for its answers"
    finally:
        await rig.database.close()


async def test_shadow_replaces_a_prompt_that_cannot_be_answered(
    shadow: tuple[Rig, FakeAnswers],
) -> None:
    rig, answers = shadow
    await rig.promote_in_turn(0)
    await begin_shadow(rig)
    traffic = ShadowTraffic(rig, 6)
    await traffic.visit(1)
    await traffic.advance(61)
    answers.failing = 3
    for _ in range(3):
        await rig.answered()
        await rig.model_controller.tick()
    (prompt,) = await traffic.prompts()
    assert (prompt["state"], prompt["reason"], prompt["attempts"]) == ("left_out", "the gateway answered 500", 3)
    await traffic.until_canary()
    shadow_state = (await traffic.last()).shadow.state
    assert shadow_state is not None
    assert shadow_state.left_out == {"the gateway answered 500": 1}
    assert shadow_state.read >= 20


async def test_shadow_ignores_rewards_of_a_superseded_attempt(shadow: tuple[Rig, FakeAnswers]) -> None:
    """A registry dies while prompts are being answered. Its successor has them answered again in other sessions."""
    rig, answers = shadow
    await rig.promote_in_turn(0)
    await begin_shadow(rig)
    traffic = ShadowTraffic(rig, 7)
    (of,) = await traffic.visit(1, feedback_value=1.0)
    answers.open.clear()
    await traffic.advance(61)
    for _ in range(1000):
        if (await traffic.prompts())[0]["attempts"]:
            break
        await asyncio.sleep(0.005)
    rig.boot()
    await rig.lease.acquire()
    await rig.processor.recover()
    answers.open.set()
    await rig.model_controller.tick()
    await rig.answered()
    (prompt,) = await traffic.prompts()
    assert (prompt["state"], prompt["attempts"]) == ("answered", 2)
    last = await traffic.last()
    given_up = ids.session_key("default", f"shadow-{last.rollout_id}-0-candidate-1")
    await rig.process_events(traffic.reward(given_up, 0.0))
    async with rig.database.transaction() as tx:
        stored_units = set((await tx.execute(select(EVENTS.c.unit))).scalars())
        sessions = set((await tx.execute(select(SESSIONS.c.session_key))).scalars())
    assert stored_units == {"shadow-0-logged", "shadow-0-candidate", "shadow-0-champion"}
    assert given_up not in sessions
    assert of in sessions


async def test_shadow_without_traffic_ends_in_time(data_dir: Path) -> None:
    rig, _ = await opened(data_dir, shadow_duration_max_s=100)
    await rig.start()
    try:
        await rig.promote_in_turn(0)
        await begin_shadow(rig)
        traffic = ShadowTraffic(rig, 8)
        await traffic.advance(60)
        assert (await traffic.last()).phase == "shadow"
        await traffic.advance(60)
        last = await traffic.last()
        assert last.phase == "canary"
        assert last.shadow.state is not None
        assert (last.shadow.state.refused or "").startswith("too few prompts")
    finally:
        await rig.database.close()


async def test_shadow_releases_its_sessions_for_later_arms(shadow: tuple[Rig, FakeAnswers]) -> None:
    rig, _ = shadow
    await rig.promote_in_turn(0)
    await begin_shadow(rig)
    traffic = ShadowTraffic(rig, 9)
    keys = await traffic.visit(20)
    await traffic.until_canary()
    drawn = {key: assign_unit(traffic.split, rig.routing.champion or "", key) for key in keys}
    key, (version, assignment) = next(
        (key, assigned) for key, assigned in drawn.items() if assigned[1] and assigned[1].arm != "rest"
    )
    await rig.process_events(traffic.turn(key, version, assignment), traffic.reward(key, 1.0, revision=1))
    await traffic.advance(61)
    async with rig.database.transaction() as tx:
        rows = {row.unit: row for row in await tx.execute(select(READINGS))}
    assert json.loads(rows[key].found)["reward"] == 1.0
    assert 0 < json.loads(rows[key].expected)["reward"] < 1, "what its kind was like in the shadow"


Told = list[tuple[str, str, str]]


async def story(rig: Rig, answers: FakeAnswers, reward: float, *, dies: bool) -> tuple[Told, str]:
    await rig.promote_in_turn(0)
    new = await begin_shadow(rig)
    answers.rewards[new] = reward
    traffic = ShadowTraffic(rig, 10)
    traffic.rewards[new] = reward
    last = await traffic.last()
    while last.is_under_way and traffic._count < 3000:
        if dies:
            await reboot(rig)
        await (traffic.visit(10, feedback_value=1.0) if last.phase == "shadow" else traffic.sessions(20))
        if dies:
            await reboot(rig)
        await traffic.advance(61)
        await rig.answered()
        last = await traffic.last()
    decisions: Told = [
        (event.rollout.kind, event.reason or "", str(sorted(event.statistics.items())))
        for event in rig.sent(ModelEvent)
        if event.rollout is not None and event.rollout.kind != "begin"
    ]
    return decisions, last.phase


async def reboot(rig: Rig) -> None:
    rig.boot()
    await rig.lease.acquire()
    await rig.processor.recover()


@pytest.mark.parametrize(
    ("reward", "phase"), [(0.1, "rolled_back"), pytest.param(0.7, "champion", marks=pytest.mark.long)]
)
async def test_shadow_decisions_are_the_same_after_crashes(
    tmp_path: Path, database_url: str, reward: float, phase: str
) -> None:
    stories = []
    for dies in (False, True):
        rig, answers = await opened(tmp_path / str(dies), database_url)
        if database_url != "sqlite":
            from sqlalchemy import text

            async with rig.database.transaction() as tx:
                await tx.execute(text("DROP SCHEMA IF EXISTS registry CASCADE"))
        await rig.start()
        try:
            stories.append(await story(rig, answers, reward, dies=dies))
        finally:
            await rig.database.close()
    assert stories[1] == stories[0]
    assert stories[0][1] == phase


def test_shadow_settings_require_a_tenant() -> None:
    with pytest.raises(ValueError, match=r"shadow\.tenants names no tenant"):
        RolloutSettings(shadow_units=10)
