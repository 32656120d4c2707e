"""One registry decides; a former leader cannot write."""

from __future__ import annotations

import asyncio
import os
from datetime import datetime, timedelta

import pytest
from sqlalchemy import update

from headrace_registry.storage.leader import LeaderLease, LostLeadership
from headrace_registry.storage.tables import LEASE
from headrace_runtime.clock import Clock
from headrace_runtime.process import holders
from tests.unit.registry.rig import MODEL, Rig


def other(rig: Rig, holder: str = "elsewhere:1:x") -> LeaderLease:
    lease = LeaderLease(rig.database, rig.clock, rig.settings.lease_s)
    lease.holder = holder
    return lease


async def lease_held_by(rig: Rig, holder: str) -> None:
    async with rig.database.transaction() as tx:
        await tx.execute(update(LEASE).values(holder=holder, expires_ms=2**53))


async def test_standby_waits_until_the_lease_expires(rig: Rig) -> None:
    standby = other(rig)
    rig.lease.holder = "elsewhere:2:y"
    await lease_held_by(rig, "elsewhere:2:y")
    await rig.lease._acquire_once()
    started_s = rig.clock.elapsed_s
    await standby.acquire()
    assert rig.clock.elapsed_s - started_s >= rig.settings.lease_s
    assert standby.acquired.is_set()


async def test_standby_takes_over_at_once_after_a_release(rig: Rig) -> None:
    await rig.lease.release()
    await other(rig).acquire()
    assert rig.clock.elapsed_s == 0


async def test_standby_takes_over_at_once_from_a_dead_local_leader(rig: Rig) -> None:
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    await lease_held_by(rig, holder_of(dead.pid))
    await other(rig).acquire()
    assert rig.clock.elapsed_s == 0


async def test_standby_waits_for_a_live_local_leader(rig: Rig) -> None:
    await lease_held_by(rig, holder_of(os.getppid()))
    assert not await other(rig)._acquire_once()


def holder_of(pid: int) -> str:
    """A process of this machine, whenever it started."""
    parts = holders.new_holder().split("|")
    return "|".join((*parts[:3], str(pid), holders._start_ticks(pid) or "0", "x"))


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
async def test_standby_with_a_wrong_clock_waits_for_the_lease(rig: Rig, skew_s: float) -> None:
    """The standby checks whether the row changes, not the time in it."""
    rig.lease.holder = "elsewhere:2:y"
    await lease_held_by(rig, rig.lease.holder)
    await rig.lease._acquire_once()
    ahead = SkewedClock(rig.clock, skew_s)
    standby = LeaderLease(rig.database, ahead, rig.settings.lease_s)
    for _ in range(20):
        assert not await standby._acquire_once(), "the leader lives: it has just renewed"
        await rig.clock.sleep(rig.settings.lease_s / 4)
        assert await rig.lease._renew()
    for _ in range(5):
        await rig.clock.sleep(rig.settings.lease_s / 4)
        acquired = await standby._acquire_once()
    assert acquired, "and now it is silent"


async def test_leader_with_a_clock_set_back_keeps_its_lease(rig: Rig) -> None:
    rig.lease.holder = "elsewhere:2:y"
    await lease_held_by(rig, rig.lease.holder)
    leader = LeaderLease(rig.database, SkewedClock(rig.clock, -7200.0), rig.settings.lease_s)
    leader.holder = rig.lease.holder
    standby = other(rig)
    for _ in range(20):
        assert not await standby._acquire_once()
        await rig.clock.sleep(rig.settings.lease_s / 4)
        assert await leader._renew()


async def test_renewal_does_not_take_back_a_lost_lease(rig: Rig) -> None:
    """A leader that lost its lease does not know later decisions; it must start again from the database."""
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    await lease_held_by(rig, holder_of(dead.pid))
    with pytest.raises(LostLeadership):
        await asyncio.wait_for(rig.lease.keep(), 5)


class SkewedClock:
    """Another process's: civil time differs, durations do not."""

    def __init__(self, clock: Clock, skew_s: float) -> None:
        self._clock = clock
        self._skew = timedelta(seconds=skew_s)

    def now(self) -> datetime:
        return self._clock.now() + self._skew

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


async def test_former_leader_is_fenced(rig: Rig) -> None:
    await lease_held_by(rig, "elsewhere:1:x")
    with pytest.raises(LostLeadership):
        await asyncio.wait_for(rig.lease.keep(), 5)
    assert not rig.lease.acquired.is_set()
    with pytest.raises(LostLeadership):
        async with rig.database.transaction() as tx:
            await rig.lease.check(tx)


async def test_former_leader_neither_registers_nor_dead_letters(rig: Rig) -> None:
    await lease_held_by(rig, "elsewhere:1:x")
    with pytest.raises(LostLeadership):
        await rig.checkpoint(0)
    assert rig.bus.events == []


async def test_former_leader_cannot_store_an_audit(rig: Rig) -> None:
    (version,) = await rig.promote_in_turn(0)
    before = rig.decided()
    keep = await rig.model_controller._runner._run_audit(version)
    await lease_held_by(rig, "elsewhere:1:x")
    with pytest.raises(LostLeadership):
        await rig.model_controller._runner._write(keep)
    with pytest.raises(LostLeadership):
        await rig.model_controller._runner._begin_trial(MODEL)
    assert rig.decided() == before
    assert (await rig.model()).trials == 0


async def test_keep_renews_the_lease(rig: Rig) -> None:
    rig.lease.holder = "elsewhere:2:y"
    await lease_held_by(rig, "elsewhere:2:y")
    keeping = asyncio.create_task(rig.lease.keep())
    await rig.until(lambda: rig.clock.elapsed_s > 5 * rig.settings.lease_s)
    assert not keeping.done()
    assert not await other(rig)._acquire_once()
    keeping.cancel()
