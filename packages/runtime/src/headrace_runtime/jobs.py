"""Runs slow work (a judge's call, a user's function) outside of transactions. A crash loses none of it.

A handler enqueues a job in its own transaction. Workers lease due jobs, do the work, and finish: the result's events
and the job's removal commit together. A worker that dies lets its lease run out, and the job is done again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.metrics import JOBS
from headrace_runtime.stream_tables import StreamTables
from headrace_runtime.sweeping import COUNTED_MAX, count_some
from headrace_runtime.upsert import upsert


@dataclass(frozen=True, slots=True)
class Job:
    """A leased piece of work."""

    job_id: str
    kind: str
    payload: bytes
    attempts: int
    """How often it was leased before."""


def of_tenant(kind: str, tenant: str) -> str:
    """Return the kind of the jobs of one tenant; earlier releases wrote the bare kind."""
    return f"{kind}/{tenant}" if tenant else kind


class Jobs:
    """The queue in the service's database. All methods run in the caller's transaction."""

    def __init__(self, tables: StreamTables) -> None:
        self._table = tables.jobs

    async def enqueue(self, tx: AsyncConnection, job_id: str, kind: str, payload: bytes, due: datetime) -> None:
        """Add a job unless one with this id waits already."""
        values = {"kind": kind, "payload": payload, "attempts": 0, "due_ms": epoch_ms(due)}
        await upsert(tx, self._table, {"job_id": job_id}, values, update=False)

    async def start(self, tx: AsyncConnection, job_id: str, kind: str, payload: bytes, until: datetime) -> Job | None:
        """Add a job that is leased to the caller already, which saves a round trip; None when one waits already.

        The work may begin at once: `finish` tells whether `tx` was committed.
        """
        values = {"kind": kind, "payload": payload, "attempts": 1, "due_ms": epoch_ms(until)}
        added = await upsert(tx, self._table, {"job_id": job_id}, values, update=False)
        return Job(job_id, kind, payload, 0) if added else None

    async def release(self, tx: AsyncConnection, kind: str, now: datetime) -> None:
        """End every lease of `kind` and of its tenants. For a process that starts and has the database to itself."""
        leased = self._of(kind) & (self._table.c.due_ms > epoch_ms(now)) & (self._table.c.attempts > 0)
        await tx.execute(update(self._table).where(leased).values(due_ms=epoch_ms(now)))

    async def give_back(self, tx: AsyncConnection, job: Job, now: datetime) -> None:
        """End the lease of a job that was not begun to its end, as if it had never been leased."""
        unleased = {"due_ms": epoch_ms(now), "attempts": job.attempts}
        await tx.execute(update(self._table).where(self._is_ours(job)).values(unleased))

    async def tenants(self, tx: AsyncConnection, kind: str, after: str, limit: int) -> list[str]:
        """Return up to `limit` tenants with jobs of `kind`, in order from behind `after` on, then the first ones.

        Jobs of a tenant have the kind `of_tenant`. Each tenant is one look into the index, however many jobs it has.
        """
        column, names = self._table.c.kind, list[str]()
        start = of_tenant(kind, after)
        for low, high in ((start, None), ("", start)):
            last = low
            while len(names) < limit:
                query = select(func.min(column)).where(column > last)
                found = await tx.scalar(query if high is None else query.where(column <= high))
                if found is None:
                    break
                last = found
                if found == kind or found.startswith(f"{kind}/"):
                    names.append(found[len(kind) + 1 :])
        return names

    async def lease(self, tx: AsyncConnection, kind: str, now: datetime, lease: timedelta, limit: int) -> list[Job]:
        """Take up to `limit` due jobs; nobody else gets them before `now + lease`."""
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
            taken = {"due_ms": epoch_ms(now + lease), "attempts": table.c.attempts + 1}
            await tx.execute(update(table).where(table.c.job_id.in_(ids)).values(taken))
        return [Job(row["job_id"], row["kind"], row["payload"], row["attempts"]) for row in rows]

    async def renew(self, tx: AsyncConnection, job_ids: Collection[str], until: datetime) -> None:
        """Hold leased jobs for longer: a short lease, renewed while the work goes on, is a short wait for the dead.

        A job that another transaction is just finishing is left to it. To wait for that one would be a deadlock when it
        wants to finish another of these.
        """
        table = self._table
        free = select(table.c.job_id).where(table.c.job_id.in_(job_ids)).with_for_update(skip_locked=True)
        found = (await tx.execute(free)).scalars().all()
        if found:
            await tx.execute(update(table).where(table.c.job_id.in_(found)).values(due_ms=epoch_ms(until)))

    async def finish(self, tx: AsyncConnection, job: Job) -> bool:
        """Remove a job that was leased. False: it is somebody else's or never came to be; discard the result."""
        return bool((await tx.execute(delete(self._table).where(self._is_ours(job)))).rowcount)

    async def postpone(self, tx: AsyncConnection, job: Job, due: datetime) -> None:
        """Let somebody try again from `due` on, unless it is somebody else's already."""
        await tx.execute(update(self._table).where(self._is_ours(job)).values(due_ms=epoch_ms(due)))

    async def count_of(self, tx: AsyncConnection, kind: str, limit: int = COUNTED_MAX) -> int:
        """Return how many jobs of exactly this kind wait, up to `limit`: those of one tenant."""
        return await count_some(tx, self._table.c.kind == kind, self._table, limit)

    def _of(self, kind: str) -> ColumnElement[bool]:
        return (self._table.c.kind == kind) | self._table.c.kind.startswith(f"{kind}/", autoescape=True)

    def _is_ours(self, job: Job) -> ColumnElement[bool]:
        """Every lease counts as an attempt, so whoever leased it later has another number."""
        return (self._table.c.job_id == job.job_id) & (self._table.c.attempts == job.attempts + 1)

    async def count(self, tx: AsyncConnection, kind: str, limit: int = COUNTED_MAX) -> int:
        """How many wait, up to `limit`."""
        waiting = await count_some(tx, self._of(kind), self._table, limit)
        JOBS.labels(kind).set(waiting)
        return waiting
