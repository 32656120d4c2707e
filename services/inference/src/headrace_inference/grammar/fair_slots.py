"""Fair access to a few slots: each owner has its own queue, and free slots go to the queues in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

from headrace_inference.errors import Overloaded

Owner = TypeVar("Owner")


class FairSlots(Generic[Owner]):
    """Slots that owners acquire in turn. Used in one event loop."""

    def __init__(self, slots: int, waiting_max: int) -> None:
        """Create the slots.

        Args:
            slots: number of slots that may be in use at once.
            waiting_max: number of requests that may wait for a slot. Owners share it equally, and each may have one.
        """
        self._free = slots
        self._waiting_max = waiting_max
        self._queues: OrderedDict[Owner, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, owner: Owner) -> None:
        """Wait for a slot. The caller must call `release` afterwards.

        Raises:
            Overloaded: as many requests of the owner wait as it may have.
        """
        if self._free and not self._queues:
            self._free -= 1
            return
        owners = len(self._queues.keys() | {owner})
        waiting = len(self._queues.get(owner, ()))
        if waiting >= max(1, self._waiting_max // owners):
            raise Overloaded(f"{waiting} grammars wait to be compiled; try again")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()
            else:
                self._remove(owner, waiter)
            raise

    def release(self) -> None:
        """Release a slot, which the next owner in turn gets."""
        self._free += 1
        while self._free and self._queues:
            owner, queue = next(iter(self._queues.items()))
            waiter = queue.popleft()
            self._queues.move_to_end(owner)
            if not queue:
                del self._queues[owner]
            if not waiter.done():
                self._free -= 1
                waiter.set_result(None)

    def _remove(self, owner: Owner, waiter: asyncio.Future[None]) -> None:
        queue = self._queues.get(owner)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._queues[owner]
