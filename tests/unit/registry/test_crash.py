"""Tests of crashes and failures of the registry.

After kill -9 at any point, a new process on the same database continues. A version, a rollout or a gate run that makes
the code raise fails alone with a reason. A registry that dies and restarts makes the same decisions as one that does
not.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.control.rollout_controller import RolloutController
from headrace_registry.gate import evaluation
from headrace_registry.rollouts.plan import RolloutStage
from headrace_registry.versions import lifecycle
from headrace_runtime.errors import Unavailable
from headrace_schemas import Event, ModelEvent, Routing
from tests.unit.registry.rig import Rig
from tests.unit.registry.rollout_traffic import Traffic, canary_settings, steps, under_way


async def reboot(rig: Rig) -> None:
    rig.boot()
    await rig.lease.acquire()
    await rig.processor.recover()


@pytest.mark.parametrize("ticks", range(4))
async def test_crash_after_any_step_changes_no_outcome(rig: Rig, ticks: int) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    for _ in range(ticks):
        await rig.model_controller.tick()
        rig.follow()
    await reboot(rig)
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())
    decided = [d for d in rig.decided() if d[1] == new]
    assert decided == [(d, new) for d in ("registered", "probed", "promoted")], "each once"
    assert rig.routing.aliases == {"champion": new, "previous": old}


async def test_trial_after_a_crash_spends_its_error_again(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    rig.gate.open.clear()
    async with rig.running():
        await rig.until(lambda: rig.gate.runs == [{old}, {old, new}])
    await reboot(rig)
    rig.gate.open.set()
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())
    assert rig.gate.runs[:3] == [{old}, {old, new}, {old, new}]
    seeds = [seed for version, task, seed in rig.gate.requests if version == new and task.startswith("t")]
    assert len(set(seeds)) == len(seeds), "other draws than those that may have been seen already"
    assert rig.last("promoted").statistics["trial"] == 2


async def test_decision_without_a_bus_is_published_by_the_next_process(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    before = len(rig.bus.events)
    rig.bus.away = True
    with pytest.raises(Unavailable):
        await rig.model_controller.tick()
    assert len(rig.bus.events) == before
    rig.bus.away = False
    await reboot(rig)
    assert [served.version for served in rig.routing.serve][-1] == new


async def test_events_published_twice_are_equal(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    await rig.checkpoint(1)
    last = rig.last("registered")  # sent; the outbox row would go with the next transaction
    await reboot(rig)
    assert [event for event in rig.bus.events if event.event_id == last.event_id] == [last, last]


async def test_role_change_and_its_event_share_a_transaction(rig: Rig) -> None:
    """The bus has the decision before the routing that results from it."""
    await rig.promote_in_turn(0, 1)
    order: list[Event] = [event for event in rig.bus.events if isinstance(event, ModelEvent | Routing)]
    for position, event in enumerate(order):
        if isinstance(event, Routing) and event.champion:
            earlier = [e.version for e in order[:position] if isinstance(e, ModelEvent) and e.decision == "promoted"]
            assert event.champion in earlier


ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("poison with \x00 and \ud83d"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "bad \ud83d end", 4, 5, "surrogates not allowed"),
    "OverflowError": lambda: OverflowError("math range error"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
    "AssertionError": AssertionError,
}


@pytest.mark.parametrize("kind", ERRORS)
async def test_candidate_without_a_possible_decision_is_rejected(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (old,) = await rig.promote_in_turn(0)
    bad = await rig.checkpoint(1, parent=old)
    plan = lifecycle.plan

    def planted(view: Any, inputs: Any) -> Any:
        if view.candidate is not None and view.candidate.version == bad:
            raise ERRORS[kind]()
        return plan(view, inputs)

    monkeypatch.setattr(lifecycle, "plan", planted)
    async with rig.running():
        await rig.until(lambda: ("rejected", bad) in rig.decided())
        good = await rig.checkpoint(2, parent=old)
        await rig.until(lambda: ("promoted", good) in rig.decided())
    assert kind in (rig.last("rejected").reason or "")
    assert rig.routing.champion == good


@pytest.mark.parametrize("kind", ERRORS)
async def test_rollout_that_cannot_be_read_is_held(data_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with Rig(data_dir, settings=canary_settings()) as rig:
        await rig.promote_in_turn(0)
        await under_way(rig)
        await rig.model_controller.tick()

        async def planted(_self: RolloutController, _rollout: object) -> None:
            raise ERRORS[kind]()

        monkeypatch.setattr(RolloutController, "_take_all_readings", planted)
        for _ in range(4):
            await rig.model_controller.tick()
        last = await Traffic(rig, 14).last()
        assert last.phase == "hold"
        assert kind in last.reason


@pytest.mark.parametrize("kind", ERRORS)
async def test_gate_run_with_an_error_counts_as_failed(rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (old,) = await rig.promote_in_turn(0)

    async def planted(*_arguments: object, **_named: object) -> object:
        raise ERRORS[kind]()

    monkeypatch.setattr(evaluation, "run_trial", planted)
    bad = await rig.checkpoint(1, parent=old)
    async with rig.running():
        await rig.until(lambda: ("rejected", bad) in rig.decided())
    assert rig.routing.champion == old


async def test_controller_ends_without_its_database(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not caused by a single model ends the controller."""
    await rig.promote_in_turn(0)

    async def away(_self: RolloutController, _model: str) -> bool:
        raise Unavailable("the database is away")

    monkeypatch.setattr(RolloutController, "tick", away)
    with pytest.raises(Unavailable):
        await rig.model_controller.tick()


Told = list[tuple[str, str, str]]


async def story(rig: Rig, reward: float, *, dies: bool) -> tuple[Told, list[tuple[str, str, bool]], str]:
    """Run a rollout, and return the decisions with their statistics, the readings, and the last phase."""
    await rig.promote_in_turn(0)
    new = await under_way(rig)
    traffic = Traffic(rig, 1)
    traffic.rewards[new] = reward
    last = await traffic.last()
    while last.is_under_way and len(traffic.served) < 2000:
        if dies:
            await reboot(rig)
        await traffic.sessions(30)
        if dies:
            await reboot(rig)
        await traffic.advance(61)
        last = await traffic.last()
    decisions: Told = [
        (event.rollout.kind, event.reason or "", str(sorted(event.statistics.items())))
        for event in rig.sent(ModelEvent)
        if event.rollout is not None
        and event.rollout.kind != "begin"  # what it says is the gate's, which draws its tasks
    ]
    assert steps(rig, new).count("begin") == 1
    return decisions, await traffic.readings(), last.phase


@pytest.mark.parametrize(("reward", "phase"), [(0.2, "rolled_back"), (0.7, "champion")])
async def test_rollout_decisions_are_the_same_after_crashes(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, reward: float, phase: str
) -> None:
    monkeypatch.setattr(steps_of_rollouts, "new_salt", lambda: "salt")
    stages = (RolloutStage(share=Fraction(1, 4), units_min=5), RolloutStage(share=Fraction(1, 2)))
    stories = []
    for dies in (False, True):
        rig = Rig(tmp_path / str(dies), database_url, canary_settings(stages=stages))
        await _empty(rig, database_url)
        await rig.start()
        try:
            stories.append(await story(rig, reward, dies=dies))
        finally:
            await rig.database.close()
    assert stories[1] == stories[0]
    assert stories[0][2] == phase
    units = [unit for _, unit, _ in stories[0][1]]
    assert len(set(units)) == len(units), "each is read once"


async def test_rollout_decision_without_a_bus_is_published_later(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A routing record contains the decision, the split, the aliases and the withdrawal, so that none appears alone."""
    monkeypatch.setattr(steps_of_rollouts, "new_salt", lambda: "salt")
    async with Rig(data_dir, settings=canary_settings()) as rig:
        (old,) = await rig.promote_in_turn(0)
        new = await under_way(rig)
        traffic = Traffic(rig, 1)
        traffic.rewards[new] = 0.0
        for _ in range(3):
            await traffic.sessions(20)
        rig.bus.away = True
        with pytest.raises(Unavailable):
            await traffic.advance(61)
        rig.bus.away = False
        assert rig.routing.split is not None, "decided, and not published"
        await reboot(rig)
        after = rig.routing
        assert after.champion == old
        assert after.split is None
        assert after.withdrawn == (new,)
        assert steps(rig, new) == ["begin", "roll_back"]
        for routing in rig.sent(Routing):
            arms = routing.split.arms if routing.split else ()
            assert not {arm.version for arm in arms} & {*routing.withdrawn, routing.champion}
            assert {arm.version for arm in arms} <= {served.version for served in routing.serve}


async def test_former_leader_decides_no_rollout(data_dir: Path) -> None:
    """Of two registries, one is the leader, and the other's transactions are refused."""
    from headrace_registry.storage.leader import LeaderLease, LostLeadership

    async with Rig(data_dir, settings=canary_settings()) as rig:
        await rig.promote_in_turn(0)
        await under_way(rig)
        traffic = Traffic(rig, 1)
        await traffic.sessions(5)
        other = LeaderLease(rig.database, rig.clock, rig.settings.lease_s)
        other.holder = "elsewhere:1"
        async with rig.database.transaction() as tx:
            from sqlalchemy import update

            from headrace_registry.storage.tables import LEASE

            await tx.execute(update(LEASE).values(holder=other.holder))
        before = len(rig.bus.events)
        with pytest.raises(LostLeadership):
            await traffic.sessions(5)
        with pytest.raises(LostLeadership):
            await traffic.advance(61)
        assert len(rig.bus.events) == before
        assert await traffic.readings() == []


async def _empty(rig: Rig, database_url: str) -> None:
    """Empty the tables, because both runs use the same database server."""
    if database_url == "sqlite":
        return
    from sqlalchemy import text

    async with rig.database.transaction() as tx:
        await tx.execute(text("DROP SCHEMA IF EXISTS registry CASCADE"))
