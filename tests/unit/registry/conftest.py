"""A started rig for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.unit.registry.rig import Rig


@pytest_asyncio.fixture
async def rig(data_dir: Path) -> AsyncIterator[Rig]:
    made = Rig(data_dir)
    await made.start()
    yield made
    await made.database.close()
