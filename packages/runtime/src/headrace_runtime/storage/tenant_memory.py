"""Bounded memory that tenants share. A tenant that fills it loses its own entries, never those of other tenants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class TenantMemory(Generic[Key, Value]):
    """Entries by tenant and key, with a bounded sum of sizes. Not thread-safe.

    If the bound is exceeded, the tenant with the largest sum of sizes loses its least recently used entries.
    """

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self.size = 0
        """Sum of the sizes of all entries."""
        self._sizes: dict[str, int] = {}
        self._tenants: dict[str, OrderedDict[Key, tuple[Value, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def size_of(self, tenant: str) -> int:
        """Return the sum of the sizes of a tenant's entries."""
        return self._sizes.get(tenant, 0)

    def get(self, tenant: str, key: Key) -> Value | None:
        """Return a tenant's entry, or None. This counts as a use of the entry."""
        entries = self._tenants.get(tenant)
        if entries is None or key not in entries:
            return None
        entries.move_to_end(key)
        return entries[key][0]

    def set(self, tenant: str, key: Key, value: Value, size: int = 1) -> list[Value]:
        """Store or replace an entry, and remove others if the bound is exceeded.

        Returns:
            The removed entries. An entry larger than the bound is removed at once.
        """
        self.pop(tenant, key)
        if size > self._size_max:
            return [value]
        self._tenants.setdefault(tenant, OrderedDict())[key] = value, size
        self._add(tenant, size)
        evicted: list[Value] = []
        while self.size > self._size_max:
            largest = max(self._sizes, key=lambda name: (self._sizes[name], name))
            key, (forgotten, _) = next(iter(self._tenants[largest].items()))
            self.pop(largest, key)
            evicted.append(forgotten)
        return evicted

    def pop(self, tenant: str, key: Key) -> Value | None:
        """Remove an entry and return it, or None if it does not exist."""
        entries = self._tenants.get(tenant)
        if entries is None or key not in entries:
            return None
        value, size = entries.pop(key)
        if not entries:
            del self._tenants[tenant]
        self._add(tenant, -size)
        return value

    def _add(self, tenant: str, size: int) -> None:
        self.size += size
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        if tenant not in self._tenants:
            del self._sizes[tenant]
