"""Tables as a service's own migrations make them: made once per process on SQLite, and copied as a file afterwards."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from headrace_runtime.storage import migrations
from headrace_runtime.storage.database import Database

_pictures: dict[str, bytes] = {}
"""File that the migrations of each package leave when they start without a database."""


async def make_tables(database: Database, package: str) -> None:
    """`headrace_runtime.storage.migrations.upgrade`. PostgreSQL, and a file that is there already, see it at work each
    time."""
    file = Path(database.engine.url.database or "") if database.sqlite else None
    if file is None or file.exists():
        await migrations.upgrade(database, package)
    elif package in _pictures:
        file.write_bytes(_pictures[package])
    else:
        await migrations.upgrade(database, package)
        with contextlib.closing(sqlite3.connect(file)) as connection:
            _pictures[package] = connection.serialize()
