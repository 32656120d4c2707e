"""Bounded memory that tenants share: a tenant that fills it forgets its own entries and never those of others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class TenantMemory(Generic[Key, Value]):
    """Entries by tenant and key, of a bounded total size. Not thread-safe.

    Beyond the bound, the tenant with the largest entries together loses the one that it has not used for longest.
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
        """Return a tenant's entry, or None. The entry counts as used."""
        entries = self._tenants.get(tenant)
        if entries is None or key not in entries:
            return None
        entries.move_to_end(key)
        return entries[key][0]

    def set(self, tenant: str, key: Key, value: Value, size: int = 1) -> list[Value]:
        """Store or replace an entry, and forget those that there is no room for.

        Returns:
            The forgotten entries. An entry larger than the bound is forgotten at once.
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
        """Forget an entry and return it, or None."""
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
