"""A memory that tenants share stays within its bound, and a tenant that fills it forgets its own entries alone."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from headrace_runtime.storage.tenant_memory import TenantMemory
from tests.support.seeds import draw_seed


@pytest.mark.parametrize("case", range(20))
def test_a_memory_is_as_its_description(case: int) -> None:
    """Each call is compared with a plain list of all entries."""
    rng = random.Random(draw_seed())
    size_max = rng.choice((1, 5, 20))
    memory: TenantMemory[int, int] = TenantMemory(size_max)
    expected: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
    for value in range(300):
        tenant, key = rng.choice("aab"), rng.randrange(8)
        match rng.choice(("get", "set", "set", "pop")):
            case "get":
                entry = expected.get((tenant, key))
                assert memory.get(tenant, key) == (entry[0] if entry else None)
                if entry is not None:
                    expected.move_to_end((tenant, key))
            case "set":
                size = rng.randrange(1, 8)
                expected.pop((tenant, key), None)
                if size <= size_max:
                    expected[tenant, key] = value, size
                forgotten = _forget(expected, size_max)
                assert memory.set(tenant, key, value, size) == (forgotten if size <= size_max else [value])
            case "pop":
                entry = expected.pop((tenant, key), None)
                assert memory.pop(tenant, key) == (entry[0] if entry else None)
        assert len(memory) == len(expected)
        assert memory.size == sum(size for _, size in expected.values())
    assert all(memory.get(tenant, key) == value for (tenant, key), (value, _) in expected.items())


def _forget(entries: OrderedDict[tuple[str, int], tuple[int, int]], size_max: int) -> list[int]:
    """Remove the oldest entries of the larger tenant until the rest fits, and return their values."""
    forgotten = []
    while sum(size for _, size in entries.values()) > size_max:
        sizes = {name: sum(size for (tenant, _), (_, size) in entries.items() if tenant == name) for name in "ab"}
        largest = max(sizes, key=lambda name: (sizes[name], name))
        forgotten.append(entries.pop(next(entry for entry in entries if entry[0] == largest))[0])
    return forgotten


def test_a_greedy_tenant_forgets_its_own_entries() -> None:
    memory: TenantMemory[int, str] = TenantMemory(100)
    for number in range(40):
        memory.set("modest", number, "kept")
    for number in range(1000):
        memory.set("greedy", number, "passing")
    assert [memory.get("modest", number) for number in range(40)] == ["kept"] * 40
    assert len(memory) == 100
