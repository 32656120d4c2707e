"""Tests of the job queue: work is done although workers die, and its result counts once.

The death of a process is only detected on its own machine.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import MetaData

from headrace_runtime.process import liveness
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream.jobs import Job, Jobs
from tests.support.streams import Bench, Service, bench

metadata = MetaData()
tables = StreamTables(metadata)
jobs = Jobs(tables)
LEASE = timedelta(seconds=30)


@pytest.fixture
async def stream(database_url: str, data_dir: Path) -> AsyncIterator[Bench]:
    async with bench(Service(tables, {}), database_url, data_dir) as service_bench:
        yield service_bench


async def enqueue(stream: Bench, *names: str) -> None:
    async with stream.processor.database.transaction() as tx:
        for name in names:
            stream.clock.advance(0.001)
            await jobs.enqueue(tx, name, "k", b"payload", stream.clock.now())


async def lease(stream: Bench, limit: int = 9) -> list[Job]:
    async with stream.processor.database.transaction() as tx:
        return await jobs.lease(tx, "k", stream.clock.now(), LEASE, limit)


async def finish(stream: Bench, job: Job) -> bool:
    async with stream.processor.database.transaction() as tx:
        return await jobs.finish(tx, job) == {job.job_id}


async def test_a_job_is_leased_to_one_worker_oldest_first(stream: Bench) -> None:
    await enqueue(stream, "b", "a", "b", "c")
    assert [job.job_id for job in await lease(stream, 2)] == ["b", "a"]
    assert [job.job_id for job in await lease(stream)] == ["c"]
    assert await lease(stream) == []


async def test_who_renews_leases_waits_for_no_job_that_is_being_finished(stream: Bench) -> None:
    """Results are entered in any order, so a renewal that waits for another result would deadlock."""
    if stream.processor.database.sqlite:
        pytest.skip("SQLite has one writer at a time")
    await enqueue(stream, "a", "b")
    first, second = await lease(stream)
    database = stream.processor.database
    async with asyncio.timeout(10), database.transaction() as finishing:
        assert await jobs.finish(finishing, second)
        async with database.transaction() as renewing:
            await jobs.renew(renewing, ["a", "b"], stream.clock.now() + 2 * LEASE)
        assert await jobs.finish(finishing, first)
    assert await stream.count("jobs") == 0


async def test_jobs_finish_together_except_those_that_another_worker_has_leased(stream: Bench) -> None:
    await enqueue(stream, "a", "b", "c")
    leased = await lease(stream)
    stream.clock.advance(LEASE.total_seconds() + 1)
    (again,) = await lease(stream, 1)
    async with stream.processor.database.transaction() as tx:
        assert await jobs.finish(tx, *leased) == {"b", "c"}
        assert await jobs.finish(tx, *leased) == set()
    assert await finish(stream, again)


async def test_what_is_being_finished_is_not_renewed_and_the_rest_is(stream: Bench) -> None:
    if stream.processor.database.sqlite:
        pytest.skip("SQLite has one writer at a time")
    await enqueue(stream, "a", "b")
    _, second = await lease(stream)
    async with asyncio.timeout(10), stream.aborted() as finishing:
        assert await jobs.finish(finishing, second)
        async with stream.processor.database.transaction() as renewing:
            await jobs.renew(renewing, ["a", "b"], stream.clock.now() + 2 * LEASE)
    stream.clock.advance(LEASE.total_seconds() + 1)
    assert [job.job_id for job in await lease(stream)] == ["b"]


async def test_a_dead_workers_job_is_done_again_and_its_late_result_is_refused(stream: Bench) -> None:
    await enqueue(stream, "a")
    (dead,) = await lease(stream)
    stream.clock.advance(31)
    (living,) = await lease(stream)
    assert living.attempts == 1
    assert not await finish(stream, dead)
    assert await finish(stream, living)
    assert not await finish(stream, living), "a result counts once"
    assert await stream.count("jobs") == 0


async def test_a_lease_is_renewed_while_the_work_goes_on(stream: Bench) -> None:
    await enqueue(stream, "a", "b")
    slow, dead = await lease(stream)
    stream.clock.advance(20)
    async with stream.processor.database.transaction() as tx:
        await jobs.renew(tx, [slow.job_id], stream.clock.now() + LEASE)
    stream.clock.advance(20)
    assert [job.job_id for job in await lease(stream)] == [dead.job_id]
    assert await finish(stream, slow)


async def test_a_postponed_job_comes_back_when_it_is_due(stream: Bench) -> None:
    await enqueue(stream, "a")
    (job,) = await lease(stream)
    async with stream.processor.database.transaction() as tx:
        await jobs.postpone(tx, job, stream.clock.now() + timedelta(seconds=5))
    assert await lease(stream) == []
    stream.clock.advance(5)
    assert len(await lease(stream)) == 1


async def test_a_job_can_be_started_as_it_is_added(stream: Bench) -> None:
    until = stream.clock.now() + LEASE
    async with stream.processor.database.transaction() as tx:
        job = await jobs.start(tx, "a", "k", b"payload", until)
        assert await jobs.start(tx, "a", "k", b"other", until) is None
    assert job is not None
    assert await lease(stream) == []
    assert await finish(stream, job)


async def test_the_result_of_a_job_whose_transaction_failed_is_refused(stream: Bench) -> None:
    async with stream.aborted() as tx:
        job = await jobs.start(tx, "a", "k", b"payload", stream.clock.now() + LEASE)
    assert job is not None
    assert not await finish(stream, job)


async def test_a_process_alone_takes_over_at_once(stream: Bench) -> None:
    await enqueue(stream, "a")
    await lease(stream)
    async with stream.processor.database.transaction() as tx:
        await jobs.enqueue(tx, "later", "k", b"", stream.clock.now() + LEASE)
        await jobs.release(tx, "k", stream.clock.now())
    assert [job.job_id for job in await lease(stream)] == ["a"]


async def test_workers_never_share_a_job(stream: Bench) -> None:
    await enqueue(stream, *map(str, range(20)))
    leases = await asyncio.gather(*(lease(stream, 5) for _ in range(4)))
    assert sorted(int(job.job_id) for part in leases for job in part) == list(range(20))


async def test_waiting_jobs_are_counted_by_kind(stream: Bench) -> None:
    await enqueue(stream, "a", "b")
    async with stream.processor.database.transaction() as tx:
        assert (await jobs.count(tx, "k"), await jobs.count(tx, "other")) == (2, 0)


def of(pid: int, **changes: str) -> str:
    host, boot, space, _, _, name = liveness.new_holder().split("|")
    named = {"host": host, "boot": boot, "space": space, "started": liveness._start_ticks(pid) or "0"} | changes
    return "|".join((named["host"], named["boot"], named["space"], str(pid), named["started"], name))


@pytest.fixture
def dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_living_are_not_dead() -> None:
    assert not liveness.is_dead(of(os.getppid()))


def test_the_dead_are(dead: int) -> None:
    assert liveness.is_dead(of(dead))


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = of(process.pid)
    assert not liveness.is_dead(name)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert liveness.is_dead(name)
    process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a process started")
def test_a_number_that_was_given_again_is_another_process() -> None:
    assert liveness.is_dead(of(os.getppid(), started="1"))


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot": "before"}, {"space": "container"}])
def test_of_other_machines_nothing_is_known(dead: int, change: dict[str, str]) -> None:
    assert not liveness.is_dead(of(dead, **change))


@pytest.mark.parametrize("name", ["", "host:1:x", "a|b", "a|b|c|d|e|f"])
def test_of_names_in_another_form_nothing_is_known(name: str) -> None:
    assert not liveness.is_dead(name)


def test_each_name_is_another_one_and_readable() -> None:
    assert liveness.new_holder() != liveness.new_holder()
    assert liveness.describe(liveness.new_holder()).startswith(f"process {os.getpid()} on ")
    assert liveness.describe("elsewhere:1:x") == "elsewhere:1:x"
