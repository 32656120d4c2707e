"""Bounded memory that many tasks share."""

from __future__ import annotations

import asyncio
from collections import deque


class MemoryBudget:
    """Budget of `total` bytes, granted in the order of the requests. A larger request gets the total."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        return self._total - self._free

    async def take(self, size: int) -> int:
        """Wait for `size` bytes and return the number that was granted, which the caller must give back."""
        size = min(size, self._total)
        if self._waiting or size > self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn  # `give` has already subtracted `size` from `_free`
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give(size)
                raise
        else:
            self._free -= size
        return size

    def give(self, size: int) -> None:
        """Give back bytes, and grant waiting requests."""
        self._free += size
        while self._waiting:
            requested, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif requested <= self._free:
                self._waiting.popleft()
                self._free -= requested
                turn.set_result(None)
            else:
                break
