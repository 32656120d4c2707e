"""The migrations make the tables that the code uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from headrace_registry.storage import store
from headrace_registry.storage.tables import METADATA
from headrace_runtime.storage import migrations
from tests.unit.registry.rig import MODEL, Rig


async def test_migrations_create_the_schema_of_the_tables(rig: Rig) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"version_table": "schema_version"})
        return list(compare_metadata(context, METADATA))

    async with rig.database.transaction() as tx:
        assert await tx.run_sync(differences) == []


async def test_migration_adds_the_history_of_champions(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history follows from the version that each champion replaced."""
    rig = Rig(tmp_path / "data", database_url)
    try:
        if database_url != "sqlite":
            async with rig.database.transaction() as tx:
                await tx.execute(text("DROP SCHEMA IF EXISTS registry CASCADE"))
        real = command.upgrade
        with monkeypatch.context() as patched:
            patched.setattr(command, "upgrade", lambda config, _: real(config, "0003"))
            await migrations.upgrade(rig.database, "headrace_registry")
        line = [f"{MODEL}@{step:012x}" for step in range(4)]
        async with rig.database.transaction() as tx:
            for step, name in enumerate(line):
                replaced = line[step - 1] if step else None
                row = {"version": name, "replaced": replaced, "step": step}
                await tx.execute(
                    text(
                        "INSERT INTO versions (version, model, lineage, step, manifest, tokenizer_sha256, "
                        "template_sha256, state, request, replaced, registered_ms, changed_ms) VALUES (:version, 'm', "
                        '\'main\', :step, \'{"uri": "memory://x", "sha256": "\' || :digest || \'", '
                        "\"size\": 1}', 'a', 'b', 'promoted', '', :replaced, 1, :step)"
                    ),
                    {**row, "digest": "0" * 64},
                )
            roles = {"champion": line[3], "previous": line[2]}
            await tx.execute(
                text("INSERT INTO models (model, champion, previous, revision) VALUES ('m', :champion, :previous, 3)"),
                roles,
            )
        await migrations.upgrade(rig.database, "headrace_registry")
        async with rig.database.transaction() as tx:
            reigns = (await tx.execute(text("SELECT version FROM champions ORDER BY id"))).scalars().all()
            assert list(reigns) == line
            assert await store.rollback_target(tx, MODEL, line[3], {line[2]}) == line[1]
    finally:
        await rig.database.close()
