"""Statements of a piece of work, and whether the database reads whole tables for them.

SQLite's query plan shows it. PostgreSQL's counters show the read rows, because an index may be read from end to end,
too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.storage.database import Database

WAITING = frozenset({"positions", "ends", "outbox", "jobs", "n"})
"""Tables of waiting work, not of history: reading all of them is reading all work."""
_SCAN = re.compile(r"^SCAN (?P<table>\w+)(?: USING (?:COVERING )?INDEX (?P<index>\w+))?")


@dataclass
class Statements:
    """Executed SQL with one set of its parameters."""

    found: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def recorded(database: Database) -> Iterator[Statements]:
    """Record every statement on `database` during the block; pure inserts of values read no rows."""
    statements = Statements()
    engine = database.engine.sync_engine

    def note(_connection: Any, _cursor: Any, sql: str, parameters: Any, _context: Any, is_bulk: bool) -> None:
        plain_insert = sql.startswith("INSERT") and "VALUES" in sql
        if sql.startswith(("SELECT", "UPDATE", "DELETE", "INSERT")) and not plain_insert:
            statements.found.setdefault(sql, tuple(parameters[0] if is_bulk else parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", note)


async def scans(tx: AsyncConnection, statements: Statements, *, partial: frozenset[str], rows_max: int) -> list[str]:
    """Each statement that reads a whole table, with how. `partial` indexes hold few rows and may be read whole."""
    problems = []
    if tx.dialect.name == "postgresql":  # so that it scans only where no index helps, as it would with much to read
        await tx.exec_driver_sql("SET LOCAL enable_seqscan = off")
    for sql, parameters in statements.found.items():
        wrong = await (_sqlite if tx.dialect.name == "sqlite" else _postgresql)(tx, sql, parameters, partial, rows_max)
        problems += [f"{step}: {' '.join(sql.split())}" for step in wrong]
    return problems


async def _sqlite(tx: AsyncConnection, sql: str, parameters: Any, partial: frozenset[str], _rows_max: int) -> list[str]:
    rows = await tx.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", parameters)
    wrong = []
    for row in rows:
        scan = _SCAN.match(row.detail)
        if scan and scan["table"] not in WAITING | {"CONSTANT", "anon_1"} and scan["index"] not in partial:
            wrong.append(row.detail)
    return wrong


async def _postgresql(
    tx: AsyncConnection, sql: str, parameters: Any, _partial: frozenset[str], rows_max: int
) -> list[str]:
    plan = (await tx.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", parameters)).scalar_one()
    return _read(json.loads(plan)[0]["Plan"] if isinstance(plan, str) else plan[0]["Plan"], rows_max)


def _read(node: dict[str, Any], rows_max: int) -> list[str]:
    wrong = [line for child in node.get("Plans", ()) for line in _read(child, rows_max)]
    if node.get("Relation Name") not in WAITING | {None}:
        removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        rows = (node["Actual Rows"] + removed) * node["Actual Loops"]
        if rows > rows_max:
            wrong.append(f"{node['Node Type']} reads {rows} rows of {node['Relation Name']}")
    return wrong
