"""A bounded queue that serves its tenants in turn, so that the slow work of one tenant does not delay the others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Bounded queue that serves its tenants in turn (round robin).

    It holds at most `size` items with at most `bytes_max` bytes in total. When it is full, each tenant may still add
    items up to `reserve` of its own, until the queue has twice `size` items. A tenant without an item may add one until
    the queue has twice `bytes_max` bytes.
    """

    def __init__(self, size: int, reserve: int, bytes_max: int) -> None:
        self._size = size
        self._reserve = reserve
        self._bytes_max = bytes_max
        self._items: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()
        """Items of each tenant with their bytes. The first tenant is served next."""
        self._count = 0
        self._size_bytes = 0
        self._changed = asyncio.Event()

    def qsize(self) -> int:
        return self._count

    def empty(self) -> bool:
        return not self._count

    def count(self, tenant: str) -> int:
        return len(self._items.get(tenant, ()))

    def free_slots(self, tenant: str, size: int | None = None) -> int:
        """Return how many more items the queue accepts from a tenant.

        Args:
            tenant: the tenant.
            size: number of items to use as the limit in place of the queue's `size`. The tenant's reserve is added to
                it.
        """
        reserved = min(self._reserve - self.count(tenant), 2 * self._size - self._count)
        slots = max((self._size if size is None else size) - self._count, reserved, 0)
        return slots if self.free_bytes(tenant) > 0 else 0

    def free_bytes(self, tenant: str) -> int:
        """Return how many more bytes the queue accepts from a tenant.

        While the result is at least 1, one item of any size is accepted.
        """
        limit = self._bytes_max if self.count(tenant) else 2 * self._bytes_max
        free = self._bytes_max - self._size_bytes
        return free if free > 0 else min(1, max(limit - self._size_bytes, 0))

    def put_nowait(self, tenant: str, item: T, size_bytes: int) -> None:
        """Add an item of a tenant. The caller must have checked `free_slots`."""
        self._items.setdefault(tenant, deque()).append((item, size_bytes))
        self._count += 1
        self._size_bytes += size_bytes
        self._notify()

    def get_nowait(self) -> T:
        """Remove and return the oldest item of the next tenant."""
        tenant, items = self._items.popitem(last=False)
        item, size_bytes = items.popleft()
        if items:
            self._items[tenant] = items  # behind all others
        self._count -= 1
        self._size_bytes -= size_bytes
        self._notify()
        return item

    async def get(self) -> T:
        while not self._count:
            await self._changed.wait()
        return self.get_nowait()

    async def wait_until_below(self, size: int) -> None:
        """Wait until the queue has fewer than `size` items and at most half of `bytes_max`."""
        while self._count >= size or self._size_bytes > self._bytes_max // 2:
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
