"""A read model on each database, and a console."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_console.read_model import tables
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database
from tests.support.remembered import make_tables
from tests.unit.console.support import Stand


@pytest.fixture
async def database(database_url: str, data_dir: Path) -> AsyncIterator[Database]:
    """Return an empty read model. Its rows are deleted after the test, because PostgreSQL serves all tests."""
    common = Common.model_validate({"data_dir": data_dir, "database": {"url": database_url}})
    opened = Database.open("console", common)
    await make_tables(opened, "headrace_console")
    yield opened
    async with opened.transaction() as tx:
        for table in reversed(tables.metadata.sorted_tables):
            await tx.execute(table.delete())
    await opened.close()


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    """Return a console without events."""
    async with Stand(tmp_path) as opened:
        yield opened
