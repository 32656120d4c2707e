"""Large databases for tests, checks of query plans, and tables made by migrations.

The `fill_*` functions insert weeks of history with statements that generate rows from rows, the same on SQLite and
PostgreSQL. Keys are scattered like real ones, so that deletions touch pages everywhere. `recorded` and `scans` find
statements that read whole tables: by SQLite's query plan, and by PostgreSQL's counters of read rows, because an index
may be read completely, too. `make_tables` runs a service's own migrations once per process on SQLite and then copies
the file.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import LRUCache

from headrace_runtime.storage.database import Database, migrate

_CHUNK = 100_000
TURNS_PER_SESSION = 5

_SERIES = "WITH RECURSIVE n(i) AS (SELECT :first UNION ALL SELECT i + 1 FROM n WHERE i < :last)"


@dataclass(frozen=True, slots=True)
class Ages:
    """Ages of the rows. Timers delete the `old` ones."""

    now_ms: int
    remember_s: float
    old: int
    """Number of turns that are older than `remember_s`."""
    kept: int
    """Number of the other turns without content."""
    open: int
    """Number of the last turns that are open."""


async def fill_collector(database: Database, turns: int, ages: Ages, progress: Callable[[int, int], None]) -> None:
    """Insert `turns` turns, a session and a feedback for every five of them, and the ids of all received events."""
    key = _scattered(database, "i / 5")
    name = _scattered(database, "i")
    blank = "x''" if database.sqlite else "''::bytea"
    content = "randomblob(2000)" if database.sqlite else "decode(repeat('ab', 2000), 'hex')"
    age = _age(turns, ages)
    rows = {
        "turns": (
            1,
            "turn_id, session_key, model, explicit, request_digest, retry, delivered, place, time_ms, seen_ms,"
            " completions, tokens, prefixes, replies, trajectory_id, closed_ms, payload",
            f"{name}, {key}, 'm', {_true(database)}, 'd', 0, {_true(database)}, {age}, {age}, {age}, 1, 100,"
            f" {blank}, {blank}, CASE WHEN i <= {turns - ages.open} THEN {key} END,"
            f" CASE WHEN i <= {turns - ages.open} THEN {age} END,"
            f" CASE WHEN i > {turns - ages.kept - ages.open} THEN {content} END",
        ),
        "sessions": (
            TURNS_PER_SESSION,
            "session_key, tenant, partition, open_turns, open_completions, open_tokens, began, seen_ms, check_ms",
            f"{key}, 'remembered', i % 12, CASE WHEN i > {turns - ages.open} THEN 5 ELSE 0 END, 0, 0, {age}, {age},"
            f" CASE WHEN i > {turns - ages.open} THEN {ages.now_ms} + 100000000 END",
        ),
        "feedback": (
            TURNS_PER_SESSION,
            "event_id, session_key, partition, source_offset, turns_until, at_ms, resolved, used_ms, payload",
            f"{name}, {key}, i % 12, i, 0, {age}, {_true(database)}, {age}, {blank}",
        ),
        "seen": (1, "event_id, at_ms", f"{name}, {age}"),
    }
    await _insert(database, turns, rows, progress)


async def fill_scorer(database: Database, turns: int, ages: Ages, progress: Callable[[int, int], None]) -> None:
    """Insert `turns` turns in trajectories of five, each with two ledger entries and a feedback about one turn."""
    key = _scattered(database, "i / 5")
    name = _scattered(database, "i")
    content = "randomblob(200)" if database.sqlite else "decode(repeat('ab', 200), 'hex')"
    blank = "x''" if database.sqlite else "''::bytea"
    age = _age(turns, ages)
    entry = (
        "trajectory_id, tenant, turn_id, source, revision, outcome, value, time_ms, arrived_ms",
        f"'default', '', 'SOURCE', 0, 'scored', 0.5, {age}, {age}",
    )
    rows = {
        "trajectories": (
            TURNS_PER_SESSION,
            "trajectory_id, session_key, tenant, time_ms, arrived_ms, settle_ms, inputs, parts, emitted, payload",
            f"{key}, {key}, 'remembered', {age}, {age},"
            f" CASE WHEN i > {turns - ages.open} THEN {ages.now_ms} + 100000000 END, '', 1, '[]', {content}",
        ),
        "turns": (1, "turn_id, trajectory_id, spoken", f"{name}, {key}, {_true(database)}"),
        "feedback": (
            TURNS_PER_SESSION,
            "event_id, session_key, tenant, lists_turns, arrived_ms, payload",
            f"{name}, {key}, 'default', {_true(database)}, {age}, {blank}",
        ),
        "listed": (TURNS_PER_SESSION, "turn_id, event_id", f"{name}, {name}"),
        "ledger": (TURNS_PER_SESSION, entry[0], f"{key}, {entry[1]}".replace("SOURCE", "feedback")),
        "ledger ": (TURNS_PER_SESSION, entry[0], f"{key}, {entry[1]}".replace("SOURCE", "function:f")),
        "seen": (1, "event_id, at_ms", f"{name}, {age}"),
    }
    await _insert(database, turns, rows, progress)


async def _insert(
    database: Database,
    turns: int,
    rows: dict[str, tuple[int, str, str]],
    progress: Callable[[int, int], None],
) -> None:
    """Insert `rows`: for each table, the number of turns for one row, its columns, and their values for turn `i`."""
    inserted, total = 0, turns * len(rows)
    for table, (every, columns, values) in rows.items():
        insert = f"INSERT INTO {table.strip()} ({columns}) {_SERIES} SELECT {values} FROM n WHERE i % {every} = 0"
        if not database.sqlite:
            insert = insert.replace(":first", "CAST(:first AS BIGINT)").replace(":last", "CAST(:last AS BIGINT)")
        for first in range(0, turns, _CHUNK):
            last = min(first + _CHUNK, turns) - 1
            async with database.transaction() as tx:
                if database.sqlite:  # the pages of scattered keys stay in memory until the chunk is there
                    await tx.execute(text("PRAGMA cache_size = -262144"))
                await tx.execute(text(insert), {"first": first, "last": last})
            inserted += last - first + 1
            progress(inserted, total)
    if not database.sqlite:  # autovacuum would do it within minutes
        async with database.transaction() as tx:
            await tx.execute(text("ANALYZE"))


def _scattered(database: Database, number: str) -> str:
    """Return an SQL expression of a different text for each number, in no order."""
    mixed = f"(({number}) * 2654435761) % 4294967296"
    if database.sqlite:
        return f"printf('%08x-remembered', {mixed})"
    return f"lpad(to_hex({mixed}), 8, '0') || '-remembered'"


def _true(database: Database) -> str:
    return "1" if database.sqlite else "true"


def _age(turns: int, ages: Ages) -> str:
    """Return an SQL expression of a row's time: the first `old` rows are older than `remember_s`, the others spread
    after it.
    """
    horizon = ages.now_ms - int(ages.remember_s * 1000)
    span = max(1, (int(ages.remember_s * 1000) - 3_600_000) // max(1, turns))
    return f"CASE WHEN i < {ages.old} THEN {horizon} - {ages.old} + i ELSE {horizon} + 1000000 + i * {span} END"


WAITING = frozenset({"positions", "ends", "outbox", "jobs", "task_rematches", "n"})
"""Tables of waiting work instead of history: reading one completely means reading all work."""
_SCAN = re.compile(r"^SCAN (?P<table>\w+)(?: USING (?:COVERING )?INDEX (?P<index>\w+))?")
_SUBQUERY = re.compile(r"anon_\d+")


@dataclass
class Statements:
    """Executed SQL statements, each with one set of its parameters."""

    found: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def recorded(database: Database) -> Iterator[Statements]:
    """Record every statement on `database` during the block, except inserts of plain values, which read no rows."""
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
    """Return each statement that reads a whole table, with its plan.

    Indexes named in `partial` contain few rows and may be read completely.
    """
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
        if scan is None or _SUBQUERY.fullmatch(scan["table"]):  # the plan has a step for each table of the subquery
            continue
        if scan["table"] not in WAITING | {"CONSTANT"} and scan["index"] not in partial:
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


_compiled_statements: LRUCache[Any, Any] = LRUCache(2_000)


class _SharedStatements:
    """Compiled statements of SQLite, shared by the engines of all tests in a process."""

    def get(self, key: tuple[object, ...]) -> Any:
        return _compiled_statements.get(key[1:])

    def __setitem__(self, key: tuple[object, ...], compiled: object) -> None:
        _compiled_statements[key[1:]] = compiled


_pictures: dict[str, bytes] = {}
"""Database file of each package after its migrations ran on an empty database."""


async def make_tables(database: Database, package: str) -> None:
    """Make the tables as `headrace_runtime.storage.database.migrate` does.

    On PostgreSQL, and on an existing file, the migrations run each time.
    """
    if database.sqlite:
        database.engine.sync_engine._compiled_cache = _SharedStatements()  # type: ignore[assignment]
    file = Path(database.engine.url.database or "") if database.sqlite else None
    if file is None or file.exists():
        await migrate(database, package)
    elif package in _pictures:
        file.write_bytes(_pictures[package])
    else:
        await migrate(database, package)
        with contextlib.closing(sqlite3.connect(file)) as connection:
            _pictures[package] = connection.serialize()
