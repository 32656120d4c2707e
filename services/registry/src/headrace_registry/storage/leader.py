"""Leader election by a lease in the database. Each transaction that writes checks the lease.

So a leader that was paused and has lost its lease cannot write any more. A standby finds out with its own monotonic
clock whether the lease has expired: if the row has not changed for `lease_s`, the leader is dead. Clocks of two
machines are never compared.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.metrics import LEADER
from headrace_registry.storage.tables import LEASE
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.errors import DiskFull, Unavailable
from headrace_runtime.process import liveness
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.tables import upsert

log = get_logger(__name__)
_NAME = "leader"


class LostLeadership(Unavailable):
    """Raised if another registry has become the leader. `LeaderLease.keep` then ends this process.

    It is a subclass of `Unavailable`, because the event in progress is valid: it is not processed, but must not be
    dead-lettered.
    """


class LeaderLease:
    """Lease in the database. Only the registry that holds it may write.

    `acquire` waits for the lease, `keep` renews it, `check` fences a transaction, `release` gives it up.
    """

    def __init__(self, database: Database, clock: Clock, lease_s: float) -> None:
        self._database = database
        self._clock = clock
        self._lease_s = lease_s
        self.holder = liveness.new_holder()
        self.acquired = asyncio.Event()
        self._seen: tuple[str, int] | None = None
        """The row of another leader as it was last read."""
        self._seen_s = 0.0
        """When that row was first read in this state, by this process's monotonic clock."""

    async def acquire(self) -> None:
        """Wait until this process holds the lease. The lease of a dead process on the same machine is taken over at
        once."""
        LEADER.set(0)
        waited = False
        while not await self._acquire_once():
            if not waited:
                log.info("standing_by")
                waited = True
            await self._clock.sleep(min(1.0, self._lease_s / 4))
        self.acquired.set()
        LEADER.set(1)
        log.info("leading")

    async def keep(self) -> None:
        """Renew the lease until cancelled.

        Raises:
            LostLeadership: another process took the lease, or it could not be renewed in time.
        """
        renewed = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(self._lease_s / 4)
            try:
                if not await self._renew():
                    raise self._lost()
                renewed = self._clock.monotonic_s()
            except LostLeadership:
                raise
            except DiskFull as error:  # no other process can write the lease either, and `check` fences a late writer
                log.warning("lease_not_renewed", error=str(error))
            except Unavailable as error:
                if self._clock.monotonic_s() - renewed > self._lease_s:
                    raise self._lost() from error
                log.warning("lease_not_renewed", error=str(error))

    async def check(self, tx: AsyncConnection) -> None:
        """Lock the row of the lease until the end of `tx`, and check that this process holds it. Raises
        `LostLeadership`."""
        query = select(LEASE.c.holder).where(LEASE.c.name == _NAME).with_for_update()
        if (await tx.execute(query)).scalar_one_or_none() != self.holder:
            raise self._lost()

    async def release(self) -> None:
        """Give the lease up, so that a standby takes over at once. If this fails, the standby waits for `lease_s`."""
        if self.acquired.is_set():
            self.acquired.clear()
            LEADER.set(0)
            with contextlib.suppress(Unavailable):
                async with self._database.transaction() as tx:
                    await tx.execute(delete(LEASE).where(LEASE.c.name == _NAME, LEASE.c.holder == self.holder))

    async def _acquire_once(self) -> bool:
        """Take the lease, unless its holder is alive. Return whether this process holds it now."""
        now_s = self._clock.monotonic_s()
        async with self._database.transaction() as tx:
            row = await self._row(tx)
            if row is None:
                return await upsert(tx, LEASE, {"name": _NAME}, self._values(0), update=False)
            holder, mark = row
            silent = self._seen == row and now_s - self._seen_s >= self._lease_s
            if holder == self.holder or silent or liveness.is_dead(holder):
                await tx.execute(update(LEASE).where(LEASE.c.name == _NAME).values(self._values(mark)))
                return True
        if self._seen != row:
            self._seen, self._seen_s = row, self._clock.monotonic_s()
        return False

    async def _renew(self) -> bool:
        """Renew the lease. Return whether it was renewed.

        A lost lease is not taken again, because another leader may have written in the meantime.
        """
        async with self._database.transaction() as tx:
            row = await self._row(tx)
            if row is None or row[0] != self.holder:
                return False
            await tx.execute(update(LEASE).where(LEASE.c.name == _NAME).values(self._values(row[1])))
            return True

    async def _row(self, tx: AsyncConnection) -> tuple[str, int] | None:
        rows = (await tx.execute(select(LEASE).where(LEASE.c.name == _NAME).with_for_update())).mappings()
        row = rows.one_or_none()
        return None if row is None else (row["holder"], row["expires_ms"])

    def _values(self, mark: int) -> dict[str, str | int]:
        """Return the columns of a renewed lease.

        Other processes recognize a renewal by the changed column `expires_ms`. So each renewal increases it, even if
        the clock stands still or was set back. It is a time only because earlier releases compare it with their clocks.
        """
        expires_ms = epoch_ms(self._clock.now() + timedelta(seconds=self._lease_s))
        return {"holder": self.holder, "expires_ms": max(mark + 1, expires_ms)}

    def _lost(self) -> LostLeadership:
        self.acquired.clear()
        LEADER.set(0)
        return LostLeadership(f"{self.holder} is not the leader any more; it stands by after its restart")
