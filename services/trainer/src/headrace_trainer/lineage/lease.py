"""Acquires, renews and releases the ownership of a lineage.

The owner writes heartbeats. A process that waits for the lineage measures their age with its own monotonic clock: an
owner without a new heartbeat for `lease_s` counts as dead. Clocks of two processes are never compared. A wrong decision
does no harm: a lineage that was taken over can be saved by its new owner only (`headrace_trainer.lineage.store`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol, TypeVar

from headrace_runtime.clock import Clock
from headrace_runtime.errors import Unavailable
from headrace_runtime.process import liveness
from headrace_runtime.process.logs import get_logger
from headrace_trainer.lineage.store import LineageStore, LineageTaken, OwnerSign

log = get_logger(__name__)
_POLL_S_MAX = 1.0
_BEATS_PER_LEASE = 4
T = TypeVar("T")


class Retry(Protocol):
    """Function that runs blocking work in a thread, and retries it while a dependency is unavailable."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class Lease:
    """Lease by which one process owns a lineage. Call `acquire` once, then `renew` until the end, then `release`."""

    def __init__(
        self,
        store: LineageStore,
        clock: Clock,
        lease_s: float,
        wait_s: float,
        died: Callable[[str], bool] = liveness.is_dead,
    ) -> None:
        self._store = store
        self._clock = clock
        self._lease_s = lease_s
        self._wait_s = wait_s
        self._died = died
        self.is_waiting = False
        """Whether another process owns the lineage and is alive."""

    async def acquire(self, retry: Retry) -> None:
        """Become the owner of the lineage. Wait for at most `wait_s` while another process owns it.

        Raises:
            LineageTaken: the present owner is still alive after `wait_s`.
        """
        began_s = self._clock.monotonic_s()
        seen: OwnerSign | None = None
        since_s = began_s
        while True:
            read_at_s = self._clock.monotonic_s()
            sign = await retry(self._store.read_owner_sign)
            silent = sign == seen and read_at_s - since_s >= self._lease_s
            if (sign.is_free or silent or self._died(sign.owner)) and await retry(self._store.take_over):
                self._note_takeover(sign, silent=silent)
                return
            if sign != seen:
                seen, since_s = sign, self._clock.monotonic_s()
            self._note_waiting(sign, since_s=began_s)
            await self._clock.sleep(min(_POLL_S_MAX, self._lease_s / _BEATS_PER_LEASE))

    async def renew(self) -> NoReturn:
        """Write heartbeats until cancelled.

        The interval is in real time even if `Clock` is simulated, because other processes wait for the heartbeats. If
        the store does not accept a heartbeat, the next one follows: without the store no process can take over either.

        Raises:
            LineageTaken: another process has taken the lineage over.
        """
        while True:
            try:
                await asyncio.to_thread(self._store.beat)
            except Unavailable as error:
                log.warning("no_sign_of_life", error=str(error))
            await asyncio.sleep(self._lease_s / _BEATS_PER_LEASE)

    async def release(self) -> None:
        """Release the lineage, so that the next process can start at once and need not wait for `lease_s`."""
        try:
            await asyncio.to_thread(self._store.release)
        except Unavailable as error:
            log.warning("not_released", error=str(error))

    def _note_takeover(self, sign: OwnerSign, *, silent: bool) -> None:
        self.is_waiting = False
        if silent:
            log.warning("lineage_taken_over", owner=liveness.describe(sign.owner), silent_s=self._lease_s)

    def _note_waiting(self, sign: OwnerSign, *, since_s: float) -> None:
        """Record that the lineage is owned by another process. Raise `LineageTaken` after `wait_s`."""
        if not self.is_waiting:
            self.is_waiting = True
            log.info("standing_by", owner=liveness.describe(sign.owner))
        if self._clock.monotonic_s() - since_s > self._wait_s:
            raise LineageTaken(
                f"{liveness.describe(sign.owner)} trains this lineage and was alive for the {self._wait_s:g} s that "
                "this process waited (trainer.owner_wait_s). Stop one of them, or name another trainer.lineage for it"
            )
