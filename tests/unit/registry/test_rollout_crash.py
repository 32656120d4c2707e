"""Two registries get the same users, and one dies and restarts: both decide the same, on both databases."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.rollouts.plan import RolloutStage
from headrace_runtime.errors import Unavailable
from headrace_schemas import ModelEvent, Routing
from tests.support.marks import postgres_is_long
from tests.unit.registry.rig import Rig
from tests.unit.registry.rollout_traffic import Traffic, canary, steps, under_way

Told = list[tuple[str, str, str]]


async def reboot(rig: Rig) -> None:
    rig.boot()
    await rig.lease.acquire()
    await rig.processor.recover()


async def story(rig: Rig, reward: float, *, dies: bool) -> tuple[Told, list[tuple[str, str, bool]], str]:
    """Return the decisions with their statistics, the readings, and the last phase."""
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
@postgres_is_long()
async def test_rollout_decisions_are_the_same_after_crashes(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, reward: float, phase: str
) -> None:
    monkeypatch.setattr(steps_of_rollouts, "fresh_salt", lambda: "salt")
    stages = (RolloutStage(share=Fraction(1, 4), units_min=5), RolloutStage(share=Fraction(1, 2)))
    stories = []
    for dies in (False, True):
        rig = Rig(tmp_path / str(dies), database_url, canary(stages=stages))
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
    """A routing never shows one half: the decision, the split, the aliases and the withdrawal are one record."""
    monkeypatch.setattr(steps_of_rollouts, "fresh_salt", lambda: "salt")
    rig = Rig(data_dir, settings=canary())
    await rig.start()
    try:
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
    finally:
        await rig.database.close()


async def test_former_leader_decides_no_rollout(data_dir: Path) -> None:
    """Two registries at once: one leads, the other's transactions are refused."""
    from headrace_registry.storage.leader import LeaderLease, LostLeadership

    rig = Rig(data_dir, settings=canary())
    await rig.start()
    try:
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
    finally:
        await rig.database.close()


async def _empty(rig: Rig, database_url: str) -> None:
    """One server for both stories."""
    if database_url == "sqlite":
        return
    from sqlalchemy import text

    async with rig.database.transaction() as tx:
        await tx.execute(text("DROP SCHEMA IF EXISTS registry CASCADE"))
