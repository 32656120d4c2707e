"""The migrations make the tables that the code uses."""

from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from headrace_registry.tables import METADATA
from tests.unit.registry.rig import Rig


async def test_the_migrated_schema_is_the_one_in_tables(rig: Rig) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"version_table": "schema_version"})
        return list(compare_metadata(context, METADATA))

    async with rig.database.transaction() as tx:
        assert await tx.run_sync(differences) == []
