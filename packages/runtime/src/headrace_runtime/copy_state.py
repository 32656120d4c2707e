"""Copies the state of services from SQLite files to PostgreSQL, for an installation that outgrows one machine.

`python -m headrace_runtime.copy_state postgresql://user@host/database [--config headrace.toml]`, services stopped.

Each service's tables are copied in one transaction and compared before it commits, so it may be killed and run again.
Afterwards `database.url` is all that changes. The SQLite files stay as they are.
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

from headrace_runtime import migrations, services
from headrace_runtime.database import Database
from headrace_runtime.errors import HeadraceError
from headrace_runtime.settings import Common, ServiceSettings, load

_ROWS_AT_ONCE = 500
_VERSION_TABLE = "schema_version"


class NotEmpty(HeadraceError):
    """The target holds other state already."""


async def copy(service: str, package: str, source: Database, target: Database) -> dict[str, int]:
    """Rows by table. What was copied before is only compared. Raises `NotEmpty`, `Unavailable`."""
    for database in (source, target):
        await migrations.upgrade(database, package)
    async with source.transaction() as old, target.transaction() as new:
        tables = await new.run_sync(_tables, target.schema)
        copied = {}
        for one in tables:
            if not await new.scalar(select(func.count()).select_from(one)):
                await _fill(old, new, one)
            ours, theirs = await _digest(old, one), await _digest(new, one)
            if ours != theirs:
                raise NotEmpty(
                    f"{service}: table {one.name} has {theirs[0]} rows there that are not the {ours[0]} here; "
                    f'if nobody needs them, drop the schema there first: DROP SCHEMA "{target.schema}" CASCADE'
                )
            copied[one.name] = ours[0]
        return copied


def _tables(connection: Connection, schema: str | None) -> list[Table]:
    found = MetaData()
    found.reflect(connection, schema=schema)
    return [one for one in found.sorted_tables if one.name != _VERSION_TABLE]


async def _fill(old: AsyncConnection, new: AsyncConnection, target: Table) -> None:
    rows = await old.stream(_ordered(target))
    async for some in rows.mappings().partitions(_ROWS_AT_ONCE):
        await new.execute(insert(target), [_typed(target, row) for row in some])
    for key in target.primary_key.columns:
        named = func.pg_get_serial_sequence(f'"{target.schema}"."{target.name}"', key.name)
        sequence, highest = await new.scalar(select(named)), await new.scalar(select(func.max(key)))
        if sequence is not None and highest is not None:
            await new.execute(select(func.setval(sequence, highest)))


def _ordered(known: Table) -> Select[Any]:
    """The rows in the order of their keys, without anything that was reflected about PostgreSQL's types."""
    plain = table(known.name, *(column(one.name) for one in known.columns))
    return select(plain).order_by(*(plain.c[one.name] for one in known.primary_key.columns))


def _typed(target: Table, row: RowMapping) -> dict[str, Any]:
    """SQLite has no truth values of its own."""
    truths = {one.name for one in target.columns if isinstance(one.type, Boolean)}
    return {name: bool(value) if name in truths and value is not None else value for name, value in row.items()}


async def _digest(connection: AsyncConnection, known: Table) -> tuple[int, int]:
    """How many rows, and a sum over their digests: the two databases do not order texts alike."""
    count = total = 0
    rows = await connection.stream(_ordered(known))
    async for row in rows.mappings():
        plain = repr(list(_typed(known, row).values())).encode()
        total = (total + int.from_bytes(hashlib.sha256(plain).digest())) % 2**256
        count += 1
    return count, total


async def copy_all(common: Common, url: str) -> dict[str, dict[str, int]]:
    """Every installed service that has a file under `data_dir`."""
    files = common.model_copy(update={"database": common.database.model_copy(update={"url": SecretStr("sqlite")})})
    server = common.model_copy(update={"database": common.database.model_copy(update={"url": SecretStr(url)})})
    done = {}
    for name, info in services.installed().items():
        if not (info.database and (common.data_dir / "db" / f"{name}.sqlite").exists()):
            continue
        source, target = Database.open(name, files), Database.open(name, server)
        try:
            done[name] = await copy(name, info.module, source, target)
        finally:
            await source.close()
            await target.close()
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where to: postgresql://user:password@host/database")
    parser.add_argument("--config", type=Path, help="the settings file that the services were started with")
    options = parser.parse_args(arguments)
    try:
        common, _ = load("copy_state", ServiceSettings, options.config)  # no service's own section is looked at
        done = asyncio.run(copy_all(common, options.url))
    except HeadraceError as error:
        sys.stderr.write(f"copy_state: {error}\n")
        return 1
    for service, tables in done.items():
        sys.stdout.write(f"{service}: {', '.join(f'{rows} {name}' for name, rows in tables.items())}\n")
    if not done:
        sys.stderr.write(f"copy_state: there is no SQLite file under {common.data_dir / 'db'}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
