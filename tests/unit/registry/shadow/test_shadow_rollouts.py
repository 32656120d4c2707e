"""A version in the shadow: whose prompts it gets, what that decides, what is left behind, and what a dying registry
changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import select

from headrace_registry.rollout_tables import EVENTS, READINGS, SESSIONS, UNITS
from headrace_registry.rollouts import steps as steps_of_rollouts
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_schemas import ModelEvent, UnitAssignment, ids
from headrace_schemas.assignment import assign_unit
from tests.support.marks import postgres_is_long
from tests.unit.registry.live_rollouts import steps
from tests.unit.registry.rig import Rig
from tests.unit.registry.shadow.shadowed import SHADOW, FakeAnswers, ShadowStreet, in_the_shadow, shadowed


@pytest.fixture(autouse=True)
def _one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_of_rollouts, "fresh_salt", lambda: "salt")


async def opened(folder: Path, url: str = "sqlite", **changes: object) -> tuple[Rig, FakeAnswers]:
    answers = FakeAnswers()
    rig = Rig(folder, url, shadowed(**changes), answers)  # type: ignore[arg-type]
    answers.rig = rig
    return rig, answers


@pytest_asyncio.fixture
async def shadow(data_dir: Path) -> AsyncIterator[tuple[Rig, FakeAnswers]]:
    rig, answers = await opened(data_dir)
    await rig.start()
    yield rig, answers
    await rig.database.close()


async def test_a_version_is_in_the_shadow_before_anybody_has_it(shadow: tuple[Rig, FakeAnswers]) -> None:
    rig, answers = shadow
    (old,) = await rig.crowned(0)
    new = await in_the_shadow(rig)
    street = ShadowStreet(rig, 1)
    first, before = await street.last(), rig.routing
    assert first.phase == "shadow"
    assert before.split is None, "no user has it"
    assert new in {one.version for one in rig.routing.serve}, "replicas hold it"
    await street.until_canary()
    last = await street.last()
    assert (last.phase, last.stage, steps(rig, new)) == ("canary", 0, ["begin", "advance"])
    assert {version for _, version, _ in answers.answered} == {old, new}
    assert rig.routing.split is not None
    event = next(one for one in rig.sent(ModelEvent) if one.rollout and one.rollout.kind == "advance")
    assert event.statistics["shadow.pairs"] >= 20
    assert "no harm in 2" in (event.reason or "")
    assert last.shadow.state is not None
    assert last.shadow.expected["reward"]
    await street.until_over()


async def test_each_prompt_is_answered_once_by_both_and_nobodys_session_is_left_behind(
    shadow: tuple[Rig, FakeAnswers],
) -> None:
    rig, answers = shadow
    await rig.crowned(0)
    await in_the_shadow(rig)
    street = ShadowStreet(rig, 2)
    await street.until_canary()
    of = [of for _, _, of in answers.answered]
    assert all(of.count(one) == 2 for one in of)
    assert len({session for session, _, _ in answers.answered}) == len(answers.answered)
    async with rig.database.transaction() as tx:
        for table in (SESSIONS, UNITS, EVENTS):
            assert (await tx.execute(select(table))).all() == []
    assert await street.readings() == [], "no reading of a canary was made of it"


async def test_a_version_that_is_worse_never_gets_a_user(shadow: tuple[Rig, FakeAnswers]) -> None:
    rig, answers = shadow
    rig.settings = shadowed(units=200)
    rig.boot()
    await rig.lease.acquire()
    await rig.crowned(0)
    new = await in_the_shadow(rig)
    answers.rewards[new] = 0.0
    street = ShadowStreet(rig, 3)
    await street.until_canary()
    last = await street.last()
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
async def test_whose_prompt_may_not_be_asked_is_not_kept(
    shadow: tuple[Rig, FakeAnswers], fields: dict[str, object]
) -> None:
    rig, answers = shadow
    await rig.crowned(0)
    await in_the_shadow(rig)
    street = ShadowStreet(rig, 4)
    await street.visit(5, says=1.0, **fields)
    await street.watch(61)
    await rig.answered()
    assert await street.prompts() == []
    async with rig.database.transaction() as tx:
        assert (await tx.execute(select(EVENTS))).all() == []
    assert answers.answered == []


async def test_prompts_are_bounded_in_rate_and_cost(data_dir: Path) -> None:
    rig, _ = await opened(data_dir, shadow={**SHADOW, "prompts_per_minute": 2, "tokens_max": 10})
    await rig.start()
    try:
        await rig.crowned(0)
        await in_the_shadow(rig)
        street = ShadowStreet(rig, 5)
        await street.visit(10)
        assert len(await street.prompts()) == 1
        await street.watch(30)
        await street.visit(10)
        assert len(await street.prompts()) == 2
        for _ in range(10):
            await street.watch(60)
            await rig.answered()
            await street.visit(10)
        assert sum(int(str(one["tokens"])) for one in await street.prompts()) >= 10
        assert len(await street.prompts()) <= 5, "each costs 2 for its prompts and 20 for its answers"
    finally:
        await rig.database.close()


async def test_a_prompt_that_nobody_can_answer_is_left_out_by_name_and_another_one_taken(
    shadow: tuple[Rig, FakeAnswers],
) -> None:
    rig, answers = shadow
    await rig.crowned(0)
    await in_the_shadow(rig)
    street = ShadowStreet(rig, 6)
    await street.visit(1)
    await street.watch(61)
    answers.failing = 3
    for _ in range(3):
        await rig.answered()
        await rig.director.tick()
    (one,) = await street.prompts()
    assert (one["state"], one["reason"], one["attempts"]) == ("left_out", "the gateway answered 500", 3)
    await street.until_canary()
    found = (await street.last()).shadow.state
    assert found is not None
    assert found.left_out == {"the gateway answered 500": 1}
    assert found.read >= 20


async def test_words_of_an_attempt_that_was_given_up_do_not_count(shadow: tuple[Rig, FakeAnswers]) -> None:
    """A registry that dies while prompts are being answered: the next one begins them anew, in other sessions."""
    rig, answers = shadow
    await rig.crowned(0)
    await in_the_shadow(rig)
    street = ShadowStreet(rig, 7)
    (of,) = await street.visit(1, says=1.0)
    answers.open.clear()
    await street.watch(61)
    for _ in range(1000):
        if (await street.prompts())[0]["attempts"]:
            break
        await asyncio.sleep(0.005)
    rig.boot()
    await rig.lease.acquire()
    await rig.processor.recover()
    answers.open.set()
    await rig.director.tick()
    await rig.answered()
    (one,) = await street.prompts()
    assert (one["state"], one["attempts"]) == ("answered", 2)
    last = await street.last()
    given_up = ids.session_key("default", f"shadow-{last.rollout_id}-0-candidate-1")
    await rig.hear(street.reward(given_up, 0.0))
    async with rig.database.transaction() as tx:
        known = set((await tx.execute(select(EVENTS.c.unit))).scalars())
        sessions = set((await tx.execute(select(SESSIONS.c.session_key))).scalars())
    assert known == {"shadow-0-logged", "shadow-0-candidate", "shadow-0-champion"}
    assert given_up not in sessions
    assert of in sessions


async def test_a_shadow_without_traffic_ends_in_time(data_dir: Path) -> None:
    rig, _ = await opened(data_dir, shadow_duration_max_s=100)
    await rig.start()
    try:
        await rig.crowned(0)
        await in_the_shadow(rig)
        street = ShadowStreet(rig, 8)
        await street.watch(60)
        assert (await street.last()).phase == "shadow"
        await street.watch(60)
        last = await street.last()
        assert last.phase == "canary"
        assert last.shadow.state is not None
        assert (last.shadow.state.refused or "").startswith("too few prompts")
    finally:
        await rig.database.close()


async def test_a_session_that_the_shadow_has_taken_may_be_drawn_later(shadow: tuple[Rig, FakeAnswers]) -> None:
    rig, _ = shadow
    await rig.crowned(0)
    await in_the_shadow(rig)
    street = ShadowStreet(rig, 9)
    keys = await street.visit(20)
    await street.until_canary()
    drawn = {key: assign_unit(street.split, rig.routing.champion or "", key) for key in keys}
    key, (version, assignment) = next((key, one) for key, one in drawn.items() if one[1] and one[1].arm != "rest")
    await rig.hear(street.turn(key, version, assignment), street.reward(key, 1.0, revision=1))
    await street.watch(61)
    async with rig.database.transaction() as tx:
        rows = {row.unit: row for row in await tx.execute(select(READINGS))}
    assert json.loads(rows[key].found)["reward"] == 1.0
    assert 0 < json.loads(rows[key].expected)["reward"] < 1, "what its kind was like in the shadow"


Told = list[tuple[str, str, str]]


async def story(rig: Rig, answers: FakeAnswers, reward: float, *, dies: bool) -> tuple[Told, str]:
    await rig.crowned(0)
    new = await in_the_shadow(rig)
    answers.rewards[new] = reward
    street = ShadowStreet(rig, 10)
    street.rewards[new] = reward
    last = await street.last()
    while last.going_on and street._count < 3000:
        if dies:
            await reboot(rig)
        await (street.visit(10, says=1.0) if last.phase == "shadow" else street.sessions(20))
        if dies:
            await reboot(rig)
        await street.watch(61)
        await rig.answered()
        last = await street.last()
    told: Told = [
        (one.rollout.kind, one.reason or "", str(sorted(one.statistics.items())))
        for one in rig.sent(ModelEvent)
        if one.rollout is not None and one.rollout.kind != "begin"
    ]
    return told, last.phase


async def reboot(rig: Rig) -> None:
    rig.boot()
    await rig.lease.acquire()
    await rig.processor.recover()


@pytest.mark.parametrize(
    ("reward", "phase"), [(0.1, "rolled_back"), pytest.param(0.7, "champion", marks=pytest.mark.long)]
)
@postgres_is_long()
async def test_a_registry_that_dies_after_every_step_decides_the_same(
    tmp_path: Path, database_url: str, reward: float, phase: str
) -> None:
    found = []
    for dies in (False, True):
        rig, answers = await opened(tmp_path / str(dies), database_url)
        if database_url != "sqlite":
            from sqlalchemy import text

            async with rig.database.transaction() as tx:
                await tx.execute(text("DROP SCHEMA IF EXISTS registry CASCADE"))
        await rig.start()
        try:
            found.append(await story(rig, answers, reward, dies=dies))
        finally:
            await rig.database.close()
    assert found[1] == found[0]
    assert found[0][1] == phase


def test_a_shadow_needs_somebody_who_has_agreed() -> None:
    with pytest.raises(ValueError, match=r"shadow\.tenants names nobody"):
        RolloutSettings(shadow_units=10)
