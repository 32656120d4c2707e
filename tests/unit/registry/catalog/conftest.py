"""A desk on each database that we support."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from sqlalchemy import text

from tests.unit.registry.catalog.catalog_bench import CatalogBench
from tests.unit.registry.rig import Rig


@pytest_asyncio.fixture
async def bench(data_dir: Path, database_url: str) -> AsyncIterator[CatalogBench]:
    rig = Rig(data_dir, database_url)
    await rig.start()
    yield CatalogBench(rig)
    if not rig.database.sqlite:
        async with rig.database.transaction() as tx:
            await tx.execute(text("DROP SCHEMA registry CASCADE"))
    await rig.database.close()
