"""Leader election by a lease in the database. Every transaction that writes checks the lease again.

So a leader that was paused and lost its lease cannot write any more. A standby decides with its own monotonic clock
whether the lease has run out: a row that has not changed for `lease_s` belongs to a dead leader. Clocks of two
machines are never compared.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.metrics import LEADER
from headrace_registry.tables import LEASE
from headrace_runtime import holders
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.database import Database
from headrace_runtime.errors import DiskFull, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.upsert import upsert

log = get_logger(__name__)
_NAME = "leader"


class LostLeadership(Unavailable):
    """Another registry leads, and `LeaderLease.keep` ends this process.

    It is `Unavailable`, because the event at hand is valid: it is left undone, never dead-lettered.
    """


class LeaderLease:
    """`acquire` waits for the lease, `keep` renews it, `check` fences a transaction, `release` ends it."""

    def __init__(self, database: Database, clock: Clock, lease_s: float) -> None:
        self._database = database
        self._clock = clock
        self._lease_s = lease_s
        self.holder = holders.me()
        self.held = asyncio.Event()
        self._seen: tuple[str, int] | None = None
        """The row of another leader, as last seen, ..."""
        self._seen_s = 0.0
        """... and when it was first seen like this, by our monotonic clock."""

    async def acquire(self) -> None:
        """Returns as the leader. The lease of a dead process of this machine is taken at once."""
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
        """Raises `LostLeadership` if another process has it, or if it could not be renewed in time."""
        renewed = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(self._lease_s / 4)
            try:
                if not await self._renew():
                    raise self._lost()
                renewed = self._clock.monotonic_s()
            except LostLeadership:
                raise
            except DiskFull as error:  # no other process can write it either, and `check` fences a late writer
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
        """Let a standby take over at once. Best effort: otherwise the standby waits for `lease_s`."""
        if self.held.is_set():
            self.held.clear()
            LEADER.set(0)
            with contextlib.suppress(Unavailable):
                async with self._database.transaction() as tx:
                    await tx.execute(delete(LEASE).where(LEASE.c.name == _NAME, LEASE.c.holder == self.holder))

    async def _take(self) -> bool:
        """Become the holder, unless another holder is alive."""
        asked_s = self._clock.monotonic_s()
        async with self._database.transaction() as tx:
            row = await self._row(tx)
            if row is None:
                return await upsert(tx, LEASE, {"name": _NAME}, self._values(0), update=False)
            holder, mark = row
            silent = self._seen == row and asked_s - self._seen_s >= self._lease_s
            if holder == self.holder or silent or holders.died(holder):
                await tx.execute(update(LEASE).where(LEASE.c.name == _NAME).values(self._values(mark)))
                return True
        if self._seen != row:
            self._seen, self._seen_s = row, self._clock.monotonic_s()
        return False

    async def _renew(self) -> bool:
        """Renew the lease. False: it is lost, and not taken again, because another leader may have written since."""
        async with self._database.transaction() as tx:
            row = await self._row(tx)
            if row is None or row[0] != self.holder:
                return False
            await tx.execute(update(LEASE).where(LEASE.c.name == _NAME).values(self._values(row[1])))
            return True

    async def _row(self, tx: AsyncConnection) -> tuple[str, int] | None:
        found = (await tx.execute(select(LEASE).where(LEASE.c.name == _NAME).with_for_update())).mappings()
        row = found.one_or_none()
        return None if row is None else (row["holder"], row["expires_ms"])

    def _values(self, mark: int) -> dict[str, str | int]:
        """Each renewal changes the mark, also when our clock stands still or has been set back. It is a time for the
        sake of earlier releases, which compare it with theirs."""
        expires_ms = epoch_ms(self._clock.now() + timedelta(seconds=self._lease_s))
        return {"holder": self.holder, "expires_ms": max(mark + 1, expires_ms)}

    def _lost(self) -> LostLeadership:
        self.held.clear()
        LEADER.set(0)
        return LostLeadership(f"{self.holder} is not the leader any more; it stands by after its restart")
