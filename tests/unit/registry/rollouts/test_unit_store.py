"""Tests of the stored events of a rollout's units: their bytes are bounded, each unit's and those that are read at
once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage import tables, unit_store
from headrace_registry.storage.unit_store import Membership
from tests.support.streams import Service, bench
from tests.support.turns import feedback

ROLLOUT: Any = SimpleNamespace(rollout_id="r", observed_ms=1000)


@pytest.fixture
async def tx(database_url: str, data_dir: Path) -> AsyncIterator[AsyncConnection]:
    service = Service(tables.STREAM, {})
    async with bench(service, database_url, data_dir) as stream, stream.processor.database.transaction() as opened:
        yield opened


async def enroll(tx: AsyncConnection, unit: str) -> Membership:
    member = Membership("r", unit, 0)
    assert await unit_store.enroll(tx, member, unit, "default", candidate=True, window_ms=0)
    return member


async def test_the_bytes_of_a_unit_are_bounded(tx: AsyncConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may send 1,000 feedbacks of a megabyte about one session of an arm."""
    large, small = feedback(comment="x" * 10_000), feedback()
    monkeypatch.setattr(unit_store, "_UNIT_BYTES_MAX", 2 * len(large.to_json()))
    flooded, other = await enroll(tx, "flooded"), await enroll(tx, "other")
    assert [await unit_store.add_event(tx, flooded, large, 1024) for _ in range(3)] == [True, True, False]
    assert not await unit_store.add_event(tx, flooded, small, 1024)
    assert await unit_store.add_event(tx, other, large, 1024)


async def test_units_are_read_up_to_a_number_of_bytes(tx: AsyncConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c", "d"):
        await unit_store.add_event(tx, await enroll(tx, name), feedback(comment="x" * 10_000), 1024)
    monkeypatch.setattr(unit_store, "_READ_BYTES_MAX", 15_000)
    units, has_more = await unit_store.due_units(tx, ROLLOUT, 0, 0, 20)
    assert ([due.unit.name for due in units], has_more) == (["a", "b"], True)
    monkeypatch.setattr(unit_store, "_READ_BYTES_MAX", 1_000_000)
    units, has_more = await unit_store.due_units(tx, ROLLOUT, 0, 0, 20)
    assert (len(units), has_more) == (4, False)
    units, has_more = await unit_store.due_units(tx, ROLLOUT, 0, 0, 4)
    assert (len(units), has_more) == (4, True)
