"""When a process may take a lineage over, and how it shows that it still has it.

The owner gives signs of life. Whoever wants the lineage watches them by its own monotonic clock: an owner that shows
nothing new for `lease_s` is taken for dead. No clock of another process counts. That the judgement may be wrong harms
nobody: a lineage that was taken over can be saved by its new owner only (`headrace_trainer.lineage.store`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol, TypeVar

from headrace_runtime import holders
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Unavailable
from headrace_runtime.logs import get_logger
from headrace_trainer.lineage.store import LineageStore, LineageTaken, Sign

log = get_logger(__name__)
_LOOK_S_MAX = 1.0
_BEATS_PER_LEASE = 4
T = TypeVar("T")


class Retry(Protocol):
    """Does blocking work beside the event loop, again while something is away."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class Lease:
    """`acquire` once, then `keep` until the end, then `release`."""

    def __init__(
        self,
        store: LineageStore,
        clock: Clock,
        lease_s: float,
        wait_s: float,
        died: Callable[[str], bool] = holders.died,
    ) -> None:
        self._store = store
        self._clock = clock
        self._lease_s = lease_s
        self._wait_s = wait_s
        self._died = died
        self.waits = False
        """Another process has the lineage, and shows that it lives."""

    async def acquire(self, do: Retry) -> None:
        """Returns as the owner, `wait_s` later at most. Raises `LineageTaken` when the owner lives that long."""
        began_s = self._clock.monotonic_s()
        seen: Sign | None = None
        since_s = began_s
        while True:
            asked_s = self._clock.monotonic_s()
            sign = await do(self._store.sign)
            silent = sign == seen and asked_s - since_s >= self._lease_s
            if (sign.free or silent or self._died(sign.owner)) and await do(self._store.take):
                self._owned(sign, silent=silent)
                return
            if sign != seen:
                seen, since_s = sign, self._clock.monotonic_s()
            self._wait(sign, since_s=began_s)
            await self._clock.sleep(min(_LOOK_S_MAX, self._lease_s / _BEATS_PER_LEASE))

    async def keep(self) -> NoReturn:
        """Give signs of life until cancelled. Raises `LineageTaken` when somebody else has the lineage.

        In real time, whatever `Clock` says: it is others who wait for them. A sign that the store does not take is no
        reason to stop: without the store nobody else can take over either.
        """
        while True:
            try:
                await asyncio.to_thread(self._store.beat)
            except Unavailable as error:
                log.warning("no_sign_of_life", error=str(error))
            await asyncio.sleep(self._lease_s / _BEATS_PER_LEASE)

    async def release(self) -> None:
        """Let the next one begin at once. Best effort: without it, it waits for `lease_s`."""
        try:
            await asyncio.to_thread(self._store.release)
        except Unavailable as error:
            log.warning("not_released", error=str(error))

    def _owned(self, sign: Sign, *, silent: bool) -> None:
        self.waits = False
        if silent:
            log.warning("lineage_taken_over", owner=holders.describe(sign.owner), silent_s=self._lease_s)

    def _wait(self, sign: Sign, *, since_s: float) -> None:
        """Raises `LineageTaken` when it has been long enough."""
        if not self.waits:
            self.waits = True
            log.info("standing_by", owner=holders.describe(sign.owner))
        if self._clock.monotonic_s() - since_s > self._wait_s:
            raise LineageTaken(
                f"{holders.describe(sign.owner)} trains this lineage and was alive for the {self._wait_s:g} s that "
                "this process waited (trainer.owner_wait_s). Stop one of them, or name another trainer.lineage for it"
            )
