"""One registry decides, others stand by: a lease in the database, checked again in every transaction that writes.

A leader that was paused and lost its lease cannot write any more, whatever it still believes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from datetime import timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.metrics import LEADER
from headrace_registry.tables import LEASE
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.database import Database
from headrace_runtime.errors import DiskFull, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.upsert import upsert

log = get_logger(__name__)
_NAME = "leader"


class LostLeadership(Unavailable):
    """Another registry leads, and `Lease.keep` ends this process.

    `Unavailable`, because nothing is wrong with the work that met it: it is left undone, never dead-lettered.
    """


class Lease:
    """`acquire` waits until it is ours, `keep` renews it, `check` fences a transaction, `release` gives it up."""

    def __init__(self, database: Database, clock: Clock, lease_s: float) -> None:
        self._database = database
        self._clock = clock
        self._lease_s = lease_s
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        self.held = asyncio.Event()

    async def acquire(self) -> None:
        """Returns as the leader. The lease of a process of this machine that has died is taken at once."""
        LEADER.set(0)
        waited = False
        while not await self._take():
            if not waited:
                log.info("standing_by")
                waited = True
            await self._clock.sleep(min(1.0, self._lease_s / 4))
        self.held.set()
        LEADER.set(1)
        log.info("leading")

    async def keep(self) -> None:
        """Raises `LostLeadership` when somebody else has it, or when it could not be renewed before it ran out."""
        renewed = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(self._lease_s / 4)
            try:
                if not await self._take():
                    raise self._lost()
                renewed = self._clock.monotonic_s()
            except LostLeadership:
                raise
            except DiskFull as error:  # nobody else can take it either, and `check` fences whoever comes too late
                log.warning("lease_not_renewed", error=str(error))
            except Unavailable as error:
                if self._clock.monotonic_s() - renewed > self._lease_s:
                    raise self._lost() from error
                log.warning("lease_not_renewed", error=str(error))

    async def check(self, tx: AsyncConnection) -> None:
        """Hold the lease's row for the rest of `tx`, or raise `LostLeadership`."""
        query = select(LEASE.c.holder).where(LEASE.c.name == _NAME).with_for_update()
        if (await tx.execute(query)).scalar_one_or_none() != self.holder:
            raise self._lost()

    async def release(self) -> None:
        """Let a standby take over at once. Best effort: without it, it takes `lease_s`."""
        if self.held.is_set():
            self.held.clear()
            LEADER.set(0)
            with contextlib.suppress(Unavailable):
                async with self._database.transaction() as tx:
                    await tx.execute(delete(LEASE).where(LEASE.c.name == _NAME, LEASE.c.holder == self.holder))

    async def _take(self) -> bool:
        now = self._clock.now()
        values = {"holder": self.holder, "expires_ms": epoch_ms(now + timedelta(seconds=self._lease_s))}
        async with self._database.transaction() as tx:
            row = (
                (await tx.execute(select(LEASE).where(LEASE.c.name == _NAME).with_for_update()))
                .mappings()
                .one_or_none()
            )
            if row is None:
                return await upsert(tx, LEASE, {"name": _NAME}, values, update=False)
            if row["holder"] != self.holder and row["expires_ms"] > epoch_ms(now) and not _died_here(row["holder"]):
                return False
            await tx.execute(update(LEASE).where(LEASE.c.name == _NAME).values(values))
            return True

    def _lost(self) -> LostLeadership:
        self.held.clear()
        LEADER.set(0)
        return LostLeadership(f"{self.holder} is not the leader any more; it stands by after its restart")


def _died_here(holder: str) -> bool:
    """Whether `holder` was a process of this machine and runs no more."""
    host, pid, _ = holder.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    if int(pid) == os.getpid():
        return True  # ours, from before: in a container every process has the same number
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
