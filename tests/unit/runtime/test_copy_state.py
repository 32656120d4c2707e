"""Every table of every service is copied from SQLite to PostgreSQL unchanged, or none is."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Boolean, Connection, Float, Integer, LargeBinary, MetaData, Numeric, Table, insert, select, text

from headrace_runtime.copy_state import NotEmpty, copy
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import migrations
from headrace_runtime.storage.database import Database
from tests.support.postgres_node import PostgresNode

pytestmark = pytest.mark.postgres
SERVICES = ("collector", "judge", "registry", "scorer")
ROWS = 3


def value_of(column: Any, number: int) -> object:
    """Equal numbers give equal values in columns of one type, so that foreign keys hold."""
    kind = column.type
    if column.nullable and number == 0:
        return None
    if isinstance(kind, Boolean):
        return number % 2 == 0
    if isinstance(kind, LargeBinary):
        return b"\x00\xff" * number
    if isinstance(kind, Float | Numeric) and not isinstance(kind, Integer):
        return 0.1 + number
    return number + 2**31 * ("_ms" in column.name) if isinstance(kind, Integer) else f"ü{number}"


@pytest.fixture
async def databases(postgres: PostgresNode, tmp_path: Path) -> AsyncIterator[tuple[Database, Database]]:
    name = f"copy_{uuid.uuid4().hex[:12]}"
    common = Common.model_validate({"data_dir": tmp_path})
    server = Common.model_validate({"data_dir": tmp_path, "database": {"url": postgres.url()}})
    source, target = Database.open(name, common), Database.open(name, server)
    yield source, target
    async with target.transaction() as tx:
        await tx.execute(text(f'DROP SCHEMA IF EXISTS "{name}" CASCADE'))
    await source.close()
    await target.close()


async def fill(source: Database) -> list[Table]:
    def tables(connection: Connection) -> list[Table]:
        metadata = MetaData()
        metadata.reflect(connection)
        return [table for table in metadata.sorted_tables if table.name != "schema_version"]

    async with source.transaction() as tx:
        reflected = await tx.run_sync(tables)
        for table in reflected:
            rows = [{c.name: value_of(c, number) for c in table.columns} for number in range(ROWS)]
            await tx.execute(insert(table), rows)
    return reflected


@pytest.mark.parametrize("service", SERVICES)
async def test_every_table(service: str, databases: tuple[Database, Database]) -> None:
    source, target = databases
    await migrations.upgrade(source, f"headrace_{service}")
    tables = await fill(source)
    assert len(tables) > 4
    for _ in range(2):
        assert await copy(service, f"headrace_{service}", source, target) == {table.name: ROWS for table in tables}
    async with target.transaction() as tx:
        outbox = next(table for table in tables if table.name == "outbox")
        row = {c.name: value_of(c, ROWS) for c in outbox.columns if c.name != "id"}
        await tx.execute(insert(outbox), row)
        ids = (await tx.execute(select(outbox.c.id).order_by(outbox.c.id))).scalars().all()
        assert ids == [0, 1, 2, 3], "what is numbered goes on where it was"
    with pytest.raises(NotEmpty, match=r"table outbox has 4 rows in the target that differ from the 3 .*DROP SCHEMA"):
        await copy(service, f"headrace_{service}", source, target)
