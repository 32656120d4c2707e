"""A bound on memory that many tasks share."""

from __future__ import annotations

import asyncio
from collections import deque


class MemoryBudget:
    """`total` bytes, handed out first come, first served. A request for more than the total gets the total."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        return self._total - self._free

    async def take(self, size: int) -> int:
        """Wait for `size` bytes and return how many were taken, which the caller gives back."""
        size = min(size, self._total)
        if self._waiting or size > self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn  # `_free` is already less by `size` then
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give(size)
                raise
        else:
            self._free -= size
        return size

    def give(self, size: int) -> None:
        """Give back what was taken, or a part of it."""
        self._free += size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif wanted <= self._free:
                self._waiting.popleft()
                self._free -= wanted
                turn.set_result(None)
            else:
                break
