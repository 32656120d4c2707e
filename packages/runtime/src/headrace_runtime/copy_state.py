"""Program that copies the state of all services from SQLite files to PostgreSQL, for an installation that outgrows one
machine.

Usage, with all services stopped:
`python -m headrace_runtime.copy_state postgresql://user@host/database [--config headrace.toml]`.

The tables of a service are copied in one transaction and compared before it commits, so the program may be killed and
run again. Afterwards only `database.url` has to be changed. The SQLite files stay unchanged.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from sqlalchemy import Boolean, Connection, MetaData, RowMapping, Select, Table, column, func, insert, select, table
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime import services
from headrace_runtime.errors import HeadraceError
from headrace_runtime.settings.sections import Common, ServiceSettings, load
from headrace_runtime.storage.database import Database, migrate

_ROWS_AT_ONCE = 500
_VERSION_TABLE = "schema_version"


class NotEmpty(HeadraceError):
    """Raised if the target already contains other rows."""


async def copy(service: str, package: str, source: Database, target: Database) -> dict[str, int]:
    """Copy the tables of one service, and return the number of rows by table. A table that has rows in the target is
    only compared with the source.

    Raises:
        NotEmpty: a table of the target has rows that differ from the source.
        Unavailable: a database does not respond.
    """
    for database in (source, target):
        await migrate(database, package)
    async with source.transaction() as old, target.transaction() as new:
        tables = await new.run_sync(_reflect_tables, target.schema)
        copied = {}
        for copied_table in tables:
            name = copied_table.name
            if not await new.scalar(select(func.count()).select_from(copied_table)):
                await _fill(old, new, copied_table)
            old_digest, new_digest = await _digest(old, copied_table), await _digest(new, copied_table)
            if old_digest != new_digest:
                raise NotEmpty(
                    f"{service}: table {name} has {new_digest[0]} rows in the target that differ from the "
                    f"{old_digest[0]} rows of the source; if they are not needed, drop the schema in the target first: "
                    f'DROP SCHEMA "{target.schema}" CASCADE'
                )
            copied[name] = old_digest[0]
        return copied


def _reflect_tables(connection: Connection, schema: str | None) -> list[Table]:
    metadata = MetaData()
    metadata.reflect(connection, schema=schema)
    return [reflected for reflected in metadata.sorted_tables if reflected.name != _VERSION_TABLE]


async def _fill(old: AsyncConnection, new: AsyncConnection, target: Table) -> None:
    """Copy all rows of a table, and set its sequences so that new keys follow the highest copied ones."""
    rows = await old.stream(_order_by_key(target))
    async for batch in rows.mappings().partitions(_ROWS_AT_ONCE):
        await new.execute(insert(target), [_restore_booleans(target, row) for row in batch])
    for key in target.primary_key.columns:
        sequence_of_key = func.pg_get_serial_sequence(f'"{target.schema}"."{target.name}"', key.name)
        sequence, highest = await new.scalar(select(sequence_of_key)), await new.scalar(select(func.max(key)))
        if sequence is not None and highest is not None:
            await new.execute(select(func.setval(sequence, highest)))


def _order_by_key(reflected: Table) -> Select[Any]:
    """Return a query of all rows, ordered by primary key. It names columns without types, so that values are not
    converted."""
    plain = table(reflected.name, *(column(key.name) for key in reflected.columns))
    return select(plain).order_by(*(plain.c[key.name] for key in reflected.primary_key.columns))


def _restore_booleans(target: Table, row: RowMapping) -> dict[str, Any]:
    """Return a row in which integers of boolean columns are booleans, because SQLite stores booleans as integers."""
    booleans = {column.name for column in target.columns if isinstance(column.type, Boolean)}
    return {name: bool(value) if name in booleans and value is not None else value for name, value in row.items()}


async def _digest(connection: AsyncConnection, reflected: Table) -> tuple[int, int]:
    """Return the number of rows, and the sum of the digests of the rows.

    The sum does not depend on the order of the rows, because the two databases sort text differently.
    """
    count = total = 0
    rows = await connection.stream(_order_by_key(reflected))
    async for row in rows.mappings():
        plain = repr(list(_restore_booleans(reflected, row).values())).encode()
        total = (total + int.from_bytes(hashlib.sha256(plain).digest())) % 2**256
        count += 1
    return count, total


async def copy_all(common: Common, url: str) -> dict[str, dict[str, int]]:
    """Copy the state of each installed service that has an SQLite file under `data_dir`. Return the number of rows by
    service and table."""
    files = common.model_copy(update={"database": common.database.model_copy(update={"url": SecretStr("sqlite")})})
    server = common.model_copy(update={"database": common.database.model_copy(update={"url": SecretStr(url)})})
    copied = {}
    for name, info in services.installed_services().items():
        if not (info.database and (common.data_dir / "db" / f"{name}.sqlite").exists()):
            continue
        source, target = Database.open(name, files), Database.open(name, server)
        try:
            copied[name] = await copy(name, info.module, source, target)
        finally:
            await source.close()
            await target.close()
    return copied


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL of the target: postgresql://user:password@host/database")
    parser.add_argument("--config", type=Path, help="settings file of the services")
    options = parser.parse_args(arguments)
    try:
        common, _ = load("copy_state", ServiceSettings, options.config)  # no service: only the common settings count
        copied = asyncio.run(copy_all(common, options.url))
    except HeadraceError as error:
        sys.stderr.write(f"copy_state: {error}\n")
        return 1
    for service, tables in copied.items():
        sys.stdout.write(f"{service}: {', '.join(f'{rows} {name}' for name, rows in tables.items())}\n")
    if not copied:
        sys.stderr.write(f"copy_state: there is no SQLite file under {common.data_dir / 'db'}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
