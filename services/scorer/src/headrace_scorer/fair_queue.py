"""A bounded queue that serves its tenants in turn, so that the slow work of one tenant does not delay the others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Bounded queue that serves its tenants in turn.

    It holds `size` items. When it is full, each tenant may still have up to `reserve` items, to a total of twice
    `size`.
    """

    def __init__(self, size: int, reserve: int) -> None:
        self._size = size
        self._reserve = reserve
        self._items: OrderedDict[str, deque[T]] = OrderedDict()
        """Items of each tenant. The first tenant is served next."""
        self._count = 0
        self._changed = asyncio.Event()

    def qsize(self) -> int:
        return self._count

    def empty(self) -> bool:
        return not self._count

    def count(self, tenant: str) -> int:
        return len(self._items.get(tenant, ()))

    def free_slots(self, tenant: str, size: int | None = None) -> int:
        """Return how many more items a tenant may add.

        Args:
            size: size of the queue to assume; None for its own size. The tenant's reserve is added.
        """
        reserved = min(self._reserve - self.count(tenant), 2 * self._size - self._count)
        return max((self._size if size is None else size) - self._count, reserved, 0)

    def put_nowait(self, tenant: str, item: T) -> None:
        """Add an item. The caller must have checked `free_slots`."""
        self._items.setdefault(tenant, deque()).append(item)
        self._count += 1
        self._notify()

    def get_nowait(self) -> T:
        """Remove the oldest item of the tenant whose turn it is."""
        tenant, items = self._items.popitem(last=False)
        item = items.popleft()
        if items:
            self._items[tenant] = items  # behind all others
        self._count -= 1
        self._notify()
        return item

    async def get(self) -> T:
        while not self._count:
            await self._changed.wait()
        return self.get_nowait()

    async def wait_until_below(self, size: int) -> None:
        """Wait until fewer than `size` items are queued."""
        while self._count >= size:
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
