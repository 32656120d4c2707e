"""Tests of the registry's database: bounded reads of one model and of units, migrations, and the lease.

The migrations create the tables that the code uses. Only one registry makes decisions; a former leader cannot write.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, event, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage import store, tables, unit_store
from headrace_registry.storage.leader import LeaderLease, LostLeadership
from headrace_registry.storage.tables import LEASE, METADATA, UNITS, VERSIONS
from headrace_registry.storage.unit_store import Membership
from headrace_runtime.clock import Clock
from headrace_runtime.process import liveness
from headrace_runtime.storage import database
from tests.support.streams import Service, bench
from tests.support.turns import feedback
from tests.unit.registry.conftest import NOBODY, OTHER, RegistryState
from tests.unit.registry.rig import MODEL, START, Rig


async def test_load_model_reads_the_model_of_that_name(registry: RegistryState) -> None:
    assert await store.load_model(registry.tx, MODEL) is None
    (mine,) = await registry.promote_in_turn(0)
    (other_version,) = await registry.promote_in_turn(0, model=OTHER)
    assert ((await registry.model()).champion, (await registry.model(OTHER)).champion) == (mine, other_version)
    assert (await registry.version(mine)).model == MODEL
    assert await store.load_version(registry.tx, NOBODY) is None


async def test_newest_versions_are_ordered_and_limited(registry: RegistryState) -> None:
    names = [await registry.add(step) for step in (2, 0, 1)]
    await registry.add(9, model=OTHER)
    assert [version_record.version for version_record in await store.newest_versions(registry.tx, MODEL, 10)] == names[
        ::-1
    ]
    assert [version_record.version for version_record in await store.newest_versions(registry.tx, MODEL, 2)] == [
        names[2],
        names[1],
    ]


async def test_withdrawn_versions_are_ordered_by_withdrawal(registry: RegistryState) -> None:
    names = [await registry.add(step) for step in range(3)]
    other_version = await registry.add(9, model=OTHER)
    await registry.transition.withdraw(await registry.model(), names[0], "bad")
    await registry.transition.withdraw(await registry.model(), names[1], "bad")
    await registry.transition.withdraw(await registry.model(OTHER), other_version, "bad")
    assert await store.withdrawn_versions(registry.tx, MODEL, 10) == [names[1], names[0]]
    assert await store.withdrawn_versions(registry.tx, MODEL, 1) == [names[1]]


async def test_ancestry_ends_at_an_unregistered_parent(registry: RegistryState) -> None:
    first = await registry.add(0, NOBODY)
    second = await registry.add(1, first)
    third = await registry.add(2, second)
    await registry.add(3, second)
    assert await store.ancestry(registry.tx, third) == {first, second, third}
    assert await store.ancestry(registry.tx, None) == set()
    assert {version_record.version for version_record in await store.children(registry.tx, [second])} >= {third}


async def test_load_view_has_waiting_versions_roles_and_bases(registry: RegistryState) -> None:
    previous, champion = await registry.promote_in_turn(0, 1)
    rejected, candidate = await registry.add(2), await registry.add(3)
    await registry.transition.reject(await registry.model(), rejected, "worse", {})
    await registry.transition.adopt(await registry.model(), candidate, ())
    event, manifest = registry.checkpoint(4, base=rejected)
    await registry.transition.register(event, manifest, None)
    await registry.add(5, model=OTHER)
    view = await store.load_view(registry.tx, await registry.model(), "gate")
    assert [version_record.version for version_record in view.waiting] == [event.version]
    assert {*view.versions} == {previous, champion, candidate, event.version, rejected}


async def test_load_view_has_untrained_versions_only_on_request(registry: RegistryState) -> None:
    event, manifest = registry.checkpoint(0)
    await registry.transition.register(event, manifest, None, trained=False)
    assert (await store.load_view(registry.tx, await registry.model(), "gate")).waiting == ()
    await registry.transition.request(await registry.version(event.version), "gate")
    (waiting,) = (await store.load_view(registry.tx, await registry.model(), "gate")).waiting
    assert waiting.version == event.version


async def test_load_view_counts_rollouts_of_the_model(registry: RegistryState) -> None:
    await registry.promote_in_turn(0)
    for begun in range(3):
        view = await store.load_view(registry.tx, await registry.model(), "gate", now=START)
        assert (view.under_way, view.slots, view.rollouts_last_hour) == (begun, 2 if begun else None, begun)
        if begun < 2:
            await registry.roll_out(1 + begun)
    assert (await store.load_view(registry.tx, await registry.model(), "gate")).rollouts_last_hour == 0, (
        "nobody said what time it is"
    )


async def test_load_version_reports_collected_files(registry: RegistryState) -> None:
    present, retired = [await registry.add(step) for step in range(2)]
    await registry.tx.execute(update(VERSIONS).where(VERSIONS.c.version == retired).values(collected_ms=1))
    assert [(await registry.version(name)).collected for name in (present, retired)] == [False, True]


async def test_load_view_uses_audits_of_the_present_gate(registry: RegistryState) -> None:
    previous, champion = await registry.promote_in_turn(0, 1)
    for gate, name in (("gate", champion), ("another gate", previous)):
        await registry.transition.record_audit(await registry.version(name), gate, {"t": 0.5}, {})
    view = await store.load_view(registry.tx, await registry.model(), "gate")
    assert view.audited == {champion}


async def test_migrations_create_the_schema_of_the_tables(rig: Rig) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"version_table": "schema_version"})
        return list(compare_metadata(context, METADATA))

    async with rig.database.transaction() as tx:
        assert await tx.run_sync(differences) == []


async def test_migration_adds_the_history_of_champions(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migration derives the history from the version that each champion replaced."""
    rig = Rig(tmp_path / "data", database_url)
    try:
        if database_url != "sqlite":
            async with rig.database.transaction() as tx:
                await tx.execute(text("DROP SCHEMA IF EXISTS registry CASCADE"))
        real = command.upgrade
        with monkeypatch.context() as patched:
            patched.setattr(command, "upgrade", lambda config, _: real(config, "0003"))
            await database.migrate(rig.database, "headrace_registry")
        line = [f"{MODEL}@{step:012x}" for step in range(4)]
        async with rig.database.transaction() as tx:
            for step, name in enumerate(line):
                replaced = line[step - 1] if step else None
                row = {"version": name, "replaced": replaced, "step": step}
                await tx.execute(
                    text(
                        "INSERT INTO versions (version, model, lineage, step, manifest, tokenizer_sha256, "
                        "template_sha256, state, request, replaced, registered_ms, changed_ms) VALUES (:version, 'm', "
                        '\'main\', :step, \'{"uri": "memory://x", "sha256": "\' || :digest || \'", '
                        "\"size\": 1}', 'a', 'b', 'promoted', '', :replaced, 1, :step)"
                    ),
                    {**row, "digest": "0" * 64},
                )
            roles = {"champion": line[3], "previous": line[2]}
            await tx.execute(
                text("INSERT INTO models (model, champion, previous, revision) VALUES ('m', :champion, :previous, 3)"),
                roles,
            )
        await database.migrate(rig.database, "headrace_registry")
        async with rig.database.transaction() as tx:
            reigns = (await tx.execute(text("SELECT version FROM champions ORDER BY id"))).scalars().all()
            assert list(reigns) == line
            assert await store.rollback_target(tx, MODEL, line[3], {line[2]}) == line[1]
    finally:
        await rig.database.close()


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
    """Return the lease holder id of the process `pid` on this machine."""
    parts = liveness.new_holder().split("|")
    return "|".join((*parts[:3], str(pid), liveness._start_ticks(pid) or "0", "x"))


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
async def test_standby_with_a_wrong_clock_waits_for_the_lease(rig: Rig, skew_s: float) -> None:
    """The standby checks whether the lease row changes, and does not compare its time."""
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
    """A leader that lost its lease does not know later decisions, so it must restart from the database."""
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    await lease_held_by(rig, holder_of(dead.pid))
    with pytest.raises(LostLeadership):
        await asyncio.wait_for(rig.lease.keep(), 5)


class SkewedClock:
    """Clock of another process: its wall clock is skewed, durations are not."""

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


ROLLOUT: Any = SimpleNamespace(rollout_id="r", observed_ms=1000)


@pytest.fixture
async def tx(database_url: str, data_dir: Path) -> AsyncIterator[AsyncConnection]:
    service = Service(tables.STREAM, {})
    async with bench(service, database_url, data_dir) as stream, stream.processor.database.transaction() as opened:
        yield opened


async def enroll(tx: AsyncConnection, unit: str) -> Membership:
    member = Membership("r", unit, 0)
    assert await unit_store.enroll(tx, member, unit, "default", candidate=True, window_ms=0)
    return member


async def test_the_bytes_of_a_unit_are_bounded(tx: AsyncConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may send 1,000 feedbacks of a megabyte about one session of an arm."""
    large, small = feedback(comment="x" * 10_000), feedback()
    monkeypatch.setattr(unit_store, "_UNIT_BYTES_MAX", 2 * len(large.to_json()))
    flooded, other = await enroll(tx, "flooded"), await enroll(tx, "other")
    assert [await unit_store.add_event(tx, flooded, large, 1024) for _ in range(3)] == [True, True, False]
    assert not await unit_store.add_event(tx, flooded, small, 1024)
    assert await unit_store.add_event(tx, other, large, 1024)


async def test_an_event_of_a_unit_reads_none_of_the_earlier_ones(tx: AsyncConnection) -> None:
    """A unit may have a thousand events of a megabyte, and each would read the sizes of all before it."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    member = await enroll(tx, "unit")
    event.listen(tx.sync_connection, "before_cursor_execute", note)
    opinion = feedback()
    for _ in range(3):
        assert await unit_store.add_event(tx, member, opinion, 1024)
    assert [statement.split()[0] for statement in statements] == ["UPDATE", "INSERT"] * 3
    assert await tx.scalar(select(UNITS.c.event_bytes)) == 3 * len(opinion.to_json())


async def test_units_are_read_up_to_a_number_of_bytes(tx: AsyncConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c", "d"):
        await unit_store.add_event(tx, await enroll(tx, name), feedback(comment="x" * 10_000), 1024)
    monkeypatch.setattr(unit_store, "_READ_BYTES_MAX", 15_000)
    units, has_more = await unit_store.due_units(tx, ROLLOUT, 0, 0, 20)
    assert ([due.unit.name for due in units], has_more) == (["a", "b"], True)
    monkeypatch.setattr(unit_store, "_READ_BYTES_MAX", 1_000_000)
    units, has_more = await unit_store.due_units(tx, ROLLOUT, 0, 0, 20)
    assert (len(units), has_more) == (4, False)
    units, has_more = await unit_store.due_units(tx, ROLLOUT, 0, 0, 4)
    assert (len(units), has_more) == (4, True)
