"""Durable queue of slow jobs (a judge's call, a user's function), which run outside of transactions.

A handler enqueues a job in its own transaction. Workers lease due jobs and do the work. Then the events of the result
commit together with the removal of the job. If a worker dies, its lease expires and another worker repeats the job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.metrics import JOBS
from headrace_runtime.storage.tables import COUNTED_MAX, StreamTables, count_rows, is_one_of, upsert


@dataclass(frozen=True, slots=True)
class Job:
    """Job that this process has leased from the queue, so that no other process runs it."""

    job_id: str
    kind: str
    payload: bytes
    attempts: int
    """Number of earlier leases."""


def kind_of_tenant(kind: str, tenant: str) -> str:
    """Return the kind under which jobs of one tenant are queued: `KIND/TENANT`. Jobs of earlier releases have the kind
    without a tenant."""
    return f"{kind}/{tenant}" if tenant else kind


class Jobs:
    """Job queue in the service's database. All methods run in the caller's transaction."""

    def __init__(self, tables: StreamTables) -> None:
        self._table = tables.jobs

    async def enqueue(self, tx: AsyncConnection, job_id: str, kind: str, payload: bytes, due_at: datetime) -> None:
        """Add a job, unless the queue contains a job with this id.

        Args:
            tx: the transaction.
            job_id: id of the job.
            kind: kind of the job. `lease` returns jobs of one kind.
            payload: content of the job.
            due_at: time from which the job may be leased.
        """
        values = {"kind": kind, "payload": payload, "attempts": 0, "due_ms": epoch_ms(due_at)}
        await upsert(tx, self._table, {"job_id": job_id}, values, update=False)

    async def start(self, tx: AsyncConnection, job_id: str, kind: str, payload: bytes, until: datetime) -> Job | None:
        """Add a job and lease it to the caller at once, which saves a round trip. Return None if the queue contains a
        job with this id.

        The caller may begin the work before `tx` commits. If `tx` does not commit, `finish` does not return the job's
        id.
        """
        values = {"kind": kind, "payload": payload, "attempts": 1, "due_ms": epoch_ms(until)}
        added = await upsert(tx, self._table, {"job_id": job_id}, values, update=False)
        return Job(job_id, kind, payload, 0) if added else None

    async def release(self, tx: AsyncConnection, kind: str, now: datetime) -> None:
        """End all leases of `kind` and of its tenants. Call it at the start of a process that does not share the
        database."""
        leased = self._of(kind) & (self._table.c.due_ms > epoch_ms(now)) & (self._table.c.attempts > 0)
        await tx.execute(update(self._table).where(leased).values(due_ms=epoch_ms(now)))

    async def give_back(self, tx: AsyncConnection, job: Job, now: datetime) -> None:
        """End the lease of an unfinished job, and do not count it as an attempt."""
        unleased = {"due_ms": epoch_ms(now), "attempts": job.attempts}
        await tx.execute(update(self._table).where(self._is_leased_as(job)).values(unleased))

    async def tenants(self, tx: AsyncConnection, kind: str, after: str, limit: int) -> list[str]:
        """Return up to `limit` tenants with jobs of `kind`, in cyclic order, beginning after the tenant `after`.

        Each tenant costs one index lookup, whatever its number of jobs, because the kind of its jobs (`kind_of_tenant`)
        is indexed.
        """
        column, names = self._table.c.kind, list[str]()
        start = kind_of_tenant(kind, after)
        for low, high in ((start, None), ("", start)):
            last = low
            while len(names) < limit:
                query = select(func.min(column)).where(column > last)
                next_kind = await tx.scalar(query if high is None else query.where(column <= high))
                if next_kind is None:
                    break
                last = next_kind
                if next_kind == kind or next_kind.startswith(f"{kind}/"):
                    names.append(next_kind[len(kind) + 1 :])
        return names

    async def lease(self, tx: AsyncConnection, kind: str, now: datetime, lease: timedelta, limit: int) -> list[Job]:
        """Lease up to `limit` due jobs of a kind to the caller. No other worker gets them until `now + lease`."""
        table = self._table
        query = (
            select(table)
            .where(table.c.kind == kind, table.c.due_ms <= epoch_ms(now))
            .order_by(table.c.due_ms)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        rows = (await tx.execute(query)).mappings().all()
        if rows:
            ids = [row["job_id"] for row in rows]
            leased = {"due_ms": epoch_ms(now + lease), "attempts": table.c.attempts + 1}
            await tx.execute(update(table).where(table.c.job_id.in_(ids)).values(leased))
        return [Job(row["job_id"], row["kind"], row["payload"], row["attempts"]) for row in rows]

    async def renew(self, tx: AsyncConnection, job_ids: Collection[str], until: datetime) -> None:
        """Extend the leases of jobs until `until`. Leases can then be short, so that the jobs of dead workers are soon
        repeated.

        A job that another transaction is finishing is skipped, because waiting for that transaction could deadlock.
        """
        table = self._table
        free = select(table.c.job_id).where(table.c.job_id.in_(job_ids)).with_for_update(skip_locked=True)
        free_ids = (await tx.execute(free)).scalars().all()
        if free_ids:
            await tx.execute(update(table).where(table.c.job_id.in_(free_ids)).values(due_ms=epoch_ms(until)))

    async def finish(self, tx: AsyncConnection, *jobs: Job) -> set[str]:
        """Delete finished jobs, if their leases are still those of the caller.

        Returns:
            Ids of the deleted jobs. Discard the results of the other jobs: another worker has leased them, or they were
                never committed.
        """
        table = self._table
        leases = is_one_of(table.c.job_id, table.c.attempts, [(job.job_id, job.attempts + 1) for job in jobs])
        return set((await tx.execute(delete(table).where(leases).returning(table.c.job_id))).scalars())

    async def postpone(self, tx: AsyncConnection, job: Job, due_at: datetime) -> None:
        """Make a leased job due again at `due_at`, unless another worker has leased it since."""
        await tx.execute(update(self._table).where(self._is_leased_as(job)).values(due_ms=epoch_ms(due_at)))

    async def count_exactly(self, tx: AsyncConnection, kind: str, limit: int = COUNTED_MAX) -> int:
        """Return the number of jobs whose kind is exactly `kind`, at most `limit`. In contrast, `count` includes the
        tenants of a kind.

        For the jobs of one tenant, `kind` is `kind_of_tenant(...)`.
        """
        return await count_rows(tx, self._table.c.kind == kind, self._table, limit)

    def _of(self, kind: str) -> ColumnElement[bool]:
        return (self._table.c.kind == kind) | self._table.c.kind.startswith(f"{kind}/", autoescape=True)

    def _is_leased_as(self, job: Job) -> ColumnElement[bool]:
        """Return the SQL condition that `job` is the latest lease of its row. Each lease increases the number of
        attempts, by which leases are distinguished."""
        return (self._table.c.job_id == job.job_id) & (self._table.c.attempts == job.attempts + 1)

    async def count(self, tx: AsyncConnection, kind: str, limit: int = COUNTED_MAX) -> int:
        """Return the number of jobs of `kind` and of its tenants, at most `limit`, and set the gauge
        `headrace_jobs`."""
        waiting = await count_rows(tx, self._of(kind), self._table, limit)
        JOBS.labels(kind).set(waiting)
        return waiting
