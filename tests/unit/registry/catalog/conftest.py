"""A desk on each database that we support."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from sqlalchemy import text

from tests.unit.registry.catalog.desk import Desk
from tests.unit.registry.rig import Rig


@pytest_asyncio.fixture
async def desk(data_dir: Path, database_url: str) -> AsyncIterator[Desk]:
    rig = Rig(data_dir, database_url)
    await rig.start()
    yield Desk(rig)
    if not rig.database.sqlite:
        async with rig.database.transaction() as tx:
            await tx.execute(text("DROP SCHEMA registry CASCADE"))
    await rig.database.close()
