"""Brings a service's tables to its current version, with Alembic, at start-up."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from headrace_runtime.database import Database

_LOCK = 0x68656164  # "head": one migration at a time, whoever starts first


async def upgrade(database: Database, package: str) -> None:
    """Run what is missing of `<package>/migrations`. Several replicas may call this at once.

    Raises `Unavailable` when the database is away, Alembic's own errors when a migration is wrong.
    """
    async with database.transaction() as connection:
        if database.schema:
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            await connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{database.schema}"'))
        await connection.run_sync(_run, package)


def _run(connection: Connection, package: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(files("headrace_runtime") / "alembic"))
    config.set_main_option("version_locations", str(files(package) / "migrations"))
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
