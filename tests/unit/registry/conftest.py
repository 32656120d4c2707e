"""A started rig for each test, or the tables alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from headrace_registry.storage.tables import METADATA
from tests.unit.registry.registry_state import RegistryState
from tests.unit.registry.rig import Rig


@pytest_asyncio.fixture
async def rig(data_dir: Path) -> AsyncIterator[Rig]:
    opened = Rig(data_dir)
    await opened.start()
    yield opened
    await opened.database.close()


@pytest_asyncio.fixture
async def registry(data_dir: Path) -> AsyncIterator[RegistryState]:
    rig = Rig(data_dir)
    async with rig.database.transaction() as tx:
        await tx.run_sync(METADATA.create_all)
        yield RegistryState(rig, tx)
    await rig.database.close()
