"""One registry decides; a former leader cannot write."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from sqlalchemy import update

from headrace_registry import store
from headrace_registry.leader import Lease, LostLeadership
from headrace_registry.tables import LEASE
from tests.unit.registry.rig import EQUAL, Rig


def other(rig: Rig, holder: str = "elsewhere:1:x") -> Lease:
    lease = Lease(rig.database, rig.clock, rig.settings.lease_s)
    lease.holder = holder
    return lease


async def held_by(rig: Rig, holder: str) -> None:
    async with rig.database.transaction() as tx:
        await tx.execute(update(LEASE).values(holder=holder, expires_ms=2**53))


async def test_a_standby_waits_until_the_lease_runs_out(rig: Rig) -> None:
    standby = other(rig)
    rig.lease.holder = "elsewhere:2:y"
    await held_by(rig, "elsewhere:2:y")
    await rig.lease._take()
    started_s = rig.clock.elapsed_s
    await standby.acquire()
    assert rig.clock.elapsed_s - started_s >= rig.settings.lease_s
    assert standby.held.is_set()


async def test_a_standby_takes_over_at_once_when_the_leader_leaves(rig: Rig) -> None:
    await rig.lease.release()
    await other(rig).acquire()
    assert rig.clock.elapsed_s == 0


async def test_a_leader_of_this_machine_that_died_is_not_waited_for(rig: Rig) -> None:
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    await held_by(rig, f"{socket.gethostname()}:{dead.pid}:x")
    await other(rig).acquire()
    assert rig.clock.elapsed_s == 0


async def test_a_leader_of_this_machine_that_lives_is(rig: Rig) -> None:
    await held_by(rig, f"{socket.gethostname()}:{os.getppid()}:x")
    assert not await other(rig)._take()


async def test_a_former_leader_notices_and_its_writes_are_fenced(rig: Rig) -> None:
    await held_by(rig, "elsewhere:1:x")
    with pytest.raises(LostLeadership):
        await asyncio.wait_for(rig.lease.keep(), 5)
    assert not rig.lease.held.is_set()
    with pytest.raises(LostLeadership):
        async with rig.database.transaction() as tx:
            await rig.lease.check(tx)


async def test_a_former_leader_registers_nothing_and_dead_letters_nothing(rig: Rig) -> None:
    await held_by(rig, "elsewhere:1:x")
    with pytest.raises(LostLeadership):
        await rig.checkpoint(0)
    assert rig.bus.events == []


async def test_what_a_former_leaders_gate_measured_is_not_recorded(rig: Rig) -> None:
    (version,) = await rig.crowned(0)
    before = rig.decided()
    await held_by(rig, "elsewhere:1:x")
    with pytest.raises(LostLeadership):
        await rig.director._record(version, {"t1": 1.0})
    assert rig.decided() == before
    async with rig.database.transaction() as tx:
        measured = await store.evaluations(tx, [version], rig.gate.sha256)
    assert measured[version].scores == EQUAL


async def test_keeping_renews(rig: Rig) -> None:
    rig.lease.holder = "elsewhere:2:y"
    await held_by(rig, "elsewhere:2:y")
    keeping = asyncio.create_task(rig.lease.keep())
    await rig.until(lambda: rig.clock.elapsed_s > 5 * rig.settings.lease_s)
    assert not keeping.done()
    assert not await other(rig)._take()
    keeping.cancel()
