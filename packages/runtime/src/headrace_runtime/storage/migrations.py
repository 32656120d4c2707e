"""Migration of a service's tables to the current version, with Alembic, at start-up."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from headrace_runtime.storage.database import Database

_LOCK = 0x68656164  # "head"; key of the advisory lock that permits one migration at a time


async def upgrade(database: Database, package: str) -> None:
    """Run the pending migrations of `<package>/migrations`. Several replicas may call this concurrently.

    Raises `Unavailable` if the database does not respond, and Alembic's errors if a migration is invalid.
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
