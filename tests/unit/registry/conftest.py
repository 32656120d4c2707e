"""A started rig for each test, or the tables alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from headrace_registry.tables import METADATA
from tests.unit.registry.rig import Rig
from tests.unit.registry.transitions import Book


@pytest_asyncio.fixture
async def rig(data_dir: Path) -> AsyncIterator[Rig]:
    made = Rig(data_dir)
    await made.start()
    yield made
    await made.database.close()


@pytest_asyncio.fixture
async def book(data_dir: Path) -> AsyncIterator[Book]:
    rig = Rig(data_dir)
    async with rig.database.transaction() as tx:
        await tx.run_sync(METADATA.create_all)
        yield Book(rig, tx)
    await rig.database.close()
