"""Durable job queue for slow work (a judge's call, a user's function) outside of transactions.

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
    """A job that this process has leased from the queue, so that no other process performs it."""

    job_id: str
    kind: str
    payload: bytes
    attempts: int
    """Number of earlier leases."""


def kind_of_tenant(kind: str, tenant: str) -> str:
    """Return the job kind under which a tenant's jobs of a certain kind are queued. Jobs of earlier releases have the
    kind without a tenant.
    """
    return f"{kind}/{tenant}" if tenant else kind


class Jobs:
    """Job queue in the service's database. All methods run in the caller's transaction."""

    def __init__(self, tables: StreamTables) -> None:
        self._table = tables.jobs

    async def enqueue(self, tx: AsyncConnection, job_id: str, kind: str, payload: bytes, due_at: datetime) -> None:
        """Add a job unless the queue has a job with this id.

        Args:
            tx: the transaction.
            job_id: id of the job.
            kind: name of the part of the queue from which `lease` takes the job.
            payload: content of the job.
            due_at: time from which the job may be leased.
        """
        values = {"kind": kind, "payload": payload, "attempts": 0, "due_ms": epoch_ms(due_at)}
        await upsert(tx, self._table, {"job_id": job_id}, values, update=False)

    async def start(self, tx: AsyncConnection, job_id: str, kind: str, payload: bytes, until: datetime) -> Job | None:
        """Add a job with a lease of the caller, which saves a round trip; None if the queue has a job with this id.

        The caller may begin the work at once. `finish` does not return the job if `tx` was not committed.
        """
        values = {"kind": kind, "payload": payload, "attempts": 1, "due_ms": epoch_ms(until)}
        added = await upsert(tx, self._table, {"job_id": job_id}, values, update=False)
        return Job(job_id, kind, payload, 0) if added else None

    async def release(self, tx: AsyncConnection, kind: str, now: datetime) -> None:
        """End all leases of `kind` and of its tenants, at the start of a process that alone uses the database."""
        leased = self._of(kind) & (self._table.c.due_ms > epoch_ms(now)) & (self._table.c.attempts > 0)
        await tx.execute(update(self._table).where(leased).values(due_ms=epoch_ms(now)))

    async def give_back(self, tx: AsyncConnection, job: Job, now: datetime) -> None:
        """End the lease of an unfinished job as if it had never been leased."""
        unleased = {"due_ms": epoch_ms(now), "attempts": job.attempts}
        await tx.execute(update(self._table).where(self._is_leased_as(job)).values(unleased))

    async def tenants(self, tx: AsyncConnection, kind: str, after: str, limit: int) -> list[str]:
        """Return up to `limit` tenants with jobs of `kind`, in cyclic order beginning after the tenant `after`.

        The kind of a tenant's jobs is `kind_of_tenant`. Each tenant needs one index lookup, whatever its number of
        jobs.
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
        """Take up to `limit` due jobs of a kind for the caller. Until `now + lease` no other worker gets them."""
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
        """Extend the leases of jobs until `until`. With short, renewed leases the jobs of dead workers are repeated
        soon.

        A job that another transaction is finishing is skipped, because waiting for that transaction could deadlock.
        """
        table = self._table
        free = select(table.c.job_id).where(table.c.job_id.in_(job_ids)).with_for_update(skip_locked=True)
        free_ids = (await tx.execute(free)).scalars().all()
        if free_ids:
            await tx.execute(update(table).where(table.c.job_id.in_(free_ids)).values(due_ms=epoch_ms(until)))

    async def finish(self, tx: AsyncConnection, *jobs: Job) -> set[str]:
        """Remove leased jobs.

        Returns:
            Ids of the removed jobs. Another worker has leased the other jobs, or they were never committed: discard
            their results.
        """
        table = self._table
        leases = is_one_of(table.c.job_id, table.c.attempts, [(job.job_id, job.attempts + 1) for job in jobs])
        return set((await tx.execute(delete(table).where(leases).returning(table.c.job_id))).scalars())

    async def postpone(self, tx: AsyncConnection, job: Job, due_at: datetime) -> None:
        """Make a leased job due again at `due_at`, unless another worker has leased it."""
        await tx.execute(update(self._table).where(self._is_leased_as(job)).values(due_ms=epoch_ms(due_at)))

    async def count_exactly(self, tx: AsyncConnection, kind: str, limit: int = COUNTED_MAX) -> int:
        """Return the number of jobs whose kind equals `kind`, at most `limit`. `count` includes a kind's tenants.

        For the jobs of one tenant, `kind` is `kind_of_tenant(...)`.
        """
        return await count_rows(tx, self._table.c.kind == kind, self._table, limit)

    def _of(self, kind: str) -> ColumnElement[bool]:
        return (self._table.c.kind == kind) | self._table.c.kind.startswith(f"{kind}/", autoescape=True)

    def _is_leased_as(self, job: Job) -> ColumnElement[bool]:
        """Return the condition that `job` is the last lease. Each lease counts as an attempt, so the numbers differ."""
        return (self._table.c.job_id == job.job_id) & (self._table.c.attempts == job.attempts + 1)

    async def count(self, tx: AsyncConnection, kind: str, limit: int = COUNTED_MAX) -> int:
        """Return the number of jobs of `kind` and of its tenants, at most `limit`."""
        waiting = await count_rows(tx, self._of(kind), self._table, limit)
        JOBS.labels(kind).set(waiting)
        return waiting
