"""Queries for the pages. Each reads a bounded number of rows through an index."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.packing import join_turn, pack_id, split_turn
from headrace_console.read_model.status import split_status
from headrace_console.settings import Scope
from headrace_schemas.values.ids import RESPONSE_PREFIX, created_ms

Row = Mapping[str, Any]
PAGE_ROWS = 100
SEARCHED_MAX = 5_000
"""Largest number of sessions that one page reads to check filters without an index."""
SESSION_TURNS_MAX = 200
SEARCHED_CALLS_MAX = 500
_CALL_MS_MAX = 3_600_000
"""Longest duration of a call that `turn_of_tail` finds."""
_VERSION = re.compile(r"(?:([^@]+)@)?([0-9a-f]{12,64})")
"""Name of a version: complete, or shortened as pages show it."""
_VERSIONS_MAX = 16
_SESSION_ROWS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of captured turns by state, as `headrace status` counts them."""

    captured: int
    trained: int
    waiting: Mapping[str, int]
    dropped: Mapping[str, int]


async def read_rows(tx: AsyncConnection, query: Select[Any]) -> list[Row]:
    """Execute a query and return its rows."""
    return [dict(row) for row in (await tx.execute(query)).mappings()]


async def first_row(tx: AsyncConnection, query: Select[Any]) -> Row | None:
    """Execute a query and return its first row, or None."""
    rows = await read_rows(tx, query.limit(1))
    return rows[0] if rows else None


async def numbers_of(tx: AsyncConnection, texts: Iterable[str]) -> dict[str, int]:
    """Return, for those of the texts that the table of names contains, their numbers there."""
    table = tables.names
    rows = await tx.execute(select(table.c.name, table.c.id).where(table.c.name.in_(list(texts))))
    return {row.name: row.id for row in rows}


async def numbers_of_versions(tx: AsyncConnection, name: str) -> list[int]:
    """Return the numbers, in the table of names, of all versions that a shortened version name matches.

    Args:
        tx: the transaction.
        name: version name `model@digest`, from which the model and the end of the digest may be missing.
    """
    table, match = tables.names, _VERSION.fullmatch(name)
    if match is None:
        return list((await numbers_of(tx, [name])).values()) if "@" in name else []
    model, digest = match.groups()
    if model:
        is_named = table.c.name.startswith(f"{model}@{digest}", autoescape=True)
    else:
        is_named = table.c.name.contains(f"@{digest}", autoescape=True)
    rows = await tx.execute(select(table.c.name, table.c.id).where(is_named).limit(_VERSIONS_MAX))
    return [row.id for row in rows if _VERSION.fullmatch(row.name)]


async def has_task(tx: AsyncConnection, tenant: int, task: str) -> bool:
    """Return whether a tenant has a session of a task."""
    table = tables.sessions
    query = select(table.c.id).where(table.c.tenant == tenant, table.c.task_id == task).limit(1)
    return await tx.scalar(query) is not None


async def texts_of(tx: AsyncConnection, numbers: Iterable[int | None]) -> dict[int, str]:
    """Return the texts with these numbers in the table of names."""
    table, requested = tables.names, {number for number in numbers if number}
    if not requested:
        return {}
    rows = await tx.execute(select(table.c.id, table.c.name).where(table.c.id.in_(requested)))
    return {row.id: row.name for row in rows}


async def tenants(tx: AsyncConnection, scope: Scope) -> dict[str, int]:
    """Return the number of each tenant in `scope` that has sessions, in the order of the tenants' first sessions."""
    numbers = await _distinct(tx, tables.sessions.c.tenant)
    texts = await texts_of(tx, numbers)
    return {texts[number]: number for number in numbers if scope.permits(texts[number])}


async def _distinct(tx: AsyncConnection, column: ColumnElement[int]) -> list[int]:
    """Return the distinct numbers in an indexed column, in ascending order.

    Each number takes one look-up in the index, while DISTINCT would read the whole index.
    """
    numbers: list[int] = []
    number = await tx.scalar(select(func.min(column)))
    while number is not None:
        numbers.append(number)
        number = await tx.scalar(select(func.min(column)).where(column > number))
    return numbers


async def latest_lineage(tx: AsyncConnection, model: int) -> int | None:
    """Return the lineage of a model whose training report is the newest, or None before the first report."""
    table = tables.steps
    return await tx.scalar(
        select(table.c.lineage).where(table.c.model == model).order_by(table.c.at_us.desc()).limit(1)
    )


async def latest_lineages(tx: AsyncConnection) -> dict[int, int | None]:
    """Return, for each model, the lineage whose training report is the newest."""
    return {model: await latest_lineage(tx, model) for model in await _distinct(tx, tables.steps.c.model)}


async def counts(tx: AsyncConnection, scope: Scope) -> Counts:
    """Count the turns of the tenants in `scope` by status.

    The status of a turn is that in the latest lineage of its model (`latest_lineage`).
    """
    table, latest = tables.counts, await latest_lineages(tx)
    total = func.sum(table.c.turns)
    query = select(table.c.model, table.c.lineage, table.c.status, total)
    if scope.tenants is not None:
        query = query.where(table.c.tenant.in_((await tenants(tx, scope)).values()))
    rows = (await tx.execute(query.group_by(table.c.model, table.c.lineage, table.c.status))).all()
    names = await texts_of(tx, {row.status for row in rows})
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for model, lineage, number, turns in rows:
        if lineage in (0, latest.get(model, 0)):
            status, detail = split_status(names[number])
            totals[status][detail] += int(turns)
    by_kind = {kind: {name: n for name, n in sorted(totals[kind].items()) if n} for kind in tables.STATUSES}
    captured = sum(sum(details.values()) for details in by_kind.values())
    return Counts(captured, by_kind["trained"].get("", 0), by_kind["waiting"], by_kind["dropped"])


async def last_call(tx: AsyncConnection, scope: Scope) -> int | None:
    """Return the time of the last call that is no evaluation, in milliseconds since 1970, or None if there is none.

    It is searched among the `SEARCHED_CALLS_MAX` turns that were read last, whose numbers are the highest.
    """
    turns, sessions = tables.turns, tables.sessions
    earliest = select(func.max(turns.c.id) - SEARCHED_CALLS_MAX).scalar_subquery()
    query = select(turns.c.session, turns.c.at_ms).where(turns.c.id > earliest, turns.c.log_offset >= 0)
    # PostgreSQL does not know how few turns are newer than `earliest`: with a limit it reads no other sessions.
    newest = query.order_by(turns.c.id.desc()).limit(SEARCHED_CALLS_MAX).subquery()
    latest = select(func.max(newest.c.at_ms)).join(sessions, sessions.c.id == newest.c.session)
    latest = latest.where(tables.is_no_evaluation(sessions.c.flags))
    if scope.tenants is not None:
        latest = latest.where(sessions.c.tenant.in_((await tenants(tx, scope)).values()))
    at_ms: int | None = await tx.scalar(latest)
    return at_ms


async def session_of(tx: AsyncConnection, scope: Scope, key: str) -> Row | None:
    """Return the session with this key, or None if no tenant in `scope` has it. A key belongs to one tenant."""
    table = tables.sessions
    for row in await read_rows(tx, select(table).where(table.c.session_key == key)):
        tenant = (await texts_of(tx, [row["tenant"]]))[row["tenant"]]
        if scope.permits(tenant):
            return {**row, "tenant_name": tenant}
    return None


def turns_query() -> Select[Any]:
    """Return a query for turns, joined with the keys and the tenants of their sessions."""
    turns, sessions = tables.turns, tables.sessions
    query = select(turns, sessions.c.session_key, sessions.c.tenant)
    return query.join(sessions, sessions.c.id == turns.c.session)


def captured_turns(session: int) -> Select[Any]:
    """Return a query for the captured turns of a session, the newest first."""
    table = tables.turns
    query = turns_query().where(table.c.session == session, table.c.log_offset >= 0)
    return query.order_by(table.c.at_ms.desc(), table.c.id.desc())


async def read_turns(tx: AsyncConnection, query: Select[Any]) -> list[Row]:
    """Return the rows of a query for turns. `name` becomes the complete packed response id."""
    rows = await read_rows(tx, query)
    return [{**row, "name": join_turn(row["session_key"], row["name"])} for row in rows]


async def turn_of(tx: AsyncConnection, scope: Scope, turn_id: str) -> tuple[Row, Row] | None:
    """Return the rows of the session and of the turn with this response id, or None if no tenant in `scope` has it."""
    key, stored = split_turn(pack_id(turn_id))
    if key is None:
        query = turns_query().where(tables.IS_FOREIGN, tables.turns.c.name == stored)
    else:
        query = turns_query().where(tables.sessions.c.session_key == key, tables.is_named(tables.turns, [stored]))
    for turn in await read_turns(tx, query):
        tenant = (await texts_of(tx, [turn["tenant"]]))[turn["tenant"]]
        session = await session_of(tx, scope, turn["session_key"]) if scope.permits(tenant) else None
        if session is not None:
            return session, turn
    return None


async def turn_of_tail(tx: AsyncConnection, scope: Scope, tail: str) -> tuple[Row, Row] | None:
    """Return the rows of the session and of the turn whose response id ends in these 32 hexadecimal digits, or None.

    The digits begin with the time of the call. The search covers the last `SEARCHED_MAX` sessions of each tenant that
    had begun by then.
    """
    table = tables.sessions
    until_ms = created_ms(tail) + _CALL_MS_MAX
    for tenant in (await tenants(tx, scope)).values():
        earlier = select(table.c.id, table.c.session_key).where(table.c.tenant == tenant, table.c.began_ms <= until_ms)
        begun = earlier.order_by(table.c.began_ms.desc()).limit(SEARCHED_MAX).subquery()
        query = select(begun.c.session_key).join(tables.turns, tables.turns.c.session == begun.c.id)
        key = await tx.scalar(query.where(tables.is_named(tables.turns, [bytes.fromhex(tail)])).limit(1))
        if key is not None:
            return await turn_of(tx, scope, f"{RESPONSE_PREFIX}{key}-{tail}")
    return None


async def turn_in_session(tx: AsyncConnection, session: int, turn: int) -> Row | None:
    """Return the row of a session's captured turn by the turn's number, or None if there is none."""
    turns = await read_turns(tx, captured_turns(session).where(tables.turns.c.id == turn))
    return turns[0] if turns else None


def position_of(row: Row) -> tuple[int, int]:
    """Return the topic partition and offset of the event that a row was made from."""
    return row["partition"], row["log_offset"]


async def has_turns_after(tx: AsyncConnection, turn: Row, number: int) -> bool:
    """Return whether at least `number` captured turns follow `turn` in its session."""
    table = tables.turns
    later = tuple_(table.c.at_ms, table.c.id) > tuple_(turn["at_ms"], turn["id"])
    return len(await read_rows(tx, captured_turns(turn["session"]).where(later).limit(number))) >= number


def rewards_query(*columns: ColumnElement[Any]) -> Select[Any]:
    """Return a query for rewards with `columns` of their sessions, joined through the rewarded trajectories."""
    rewards, trajectories, sessions = tables.rewards, tables.trajectories, tables.sessions
    joined = rewards.join(trajectories, trajectories.c.id == rewards.c.trajectory)
    return select(rewards, *columns).select_from(joined.join(sessions, sessions.c.id == trajectories.c.session))


@dataclass(frozen=True, slots=True)
class SessionRecords:
    """Database rows that the page of one session shows: its last turns, the oldest first, and its newest experiences,
    rewards and feedback.

    Rows refer to names, such as those of models and sources, by numbers; `texts` has the name for each number.
    """

    turns: Sequence[Row]
    has_earlier_turns: bool
    experiences: Sequence[Row]
    rewards: Sequence[Row]
    feedback: Sequence[Row]
    texts: Mapping[int, str]


async def session_records(
    tx: AsyncConnection, session: int, before: tuple[int, int] | None = None, turns_max: int = SESSION_TURNS_MAX
) -> SessionRecords:
    """Return the rows of a session.

    Args:
        before: time and number of a turn. Only earlier turns are returned; None returns the last turns.
        turns_max: largest number of turns.
    """
    table, newest = tables.turns, captured_turns(session)
    if before is not None:
        newest = newest.where(tuple_(table.c.at_ms, table.c.id) < tuple_(*before))
    turns = await read_turns(tx, newest.limit(turns_max + 1))
    of_session = tables.experiences.c.session == session
    experiences = await _newest_rows(tx, select(tables.experiences).where(of_session), tables.experiences.c.id)
    rewarded = rewards_query().where(tables.sessions.c.id == session)
    rewards = await _newest_rows(tx, rewarded, tables.rewards.c.trajectory)
    feedback = await feedback_of(tx, session)
    numbers: set[int | None] = set()
    columns = ("model", "version", "status", "finish", "arm", "no_logprobs", "untrained")
    numbers.update(row[name] for row in turns for name in columns)
    numbers.update(row["no_reward"] for row in experiences)
    numbers.update(number for row in rewards for number in (row["source"], row["outcome"]))
    texts = await texts_of(tx, numbers)
    oldest_first = turns[turns_max - 1 :: -1] if len(turns) > turns_max else turns[::-1]
    return SessionRecords(oldest_first, len(turns) > turns_max, experiences, rewards, feedback, texts)


async def feedback_of(tx: AsyncConnection, session: int) -> list[Row]:
    """Return the rows of the newest feedback of a session, the newest first."""
    table = tables.feedback
    return await _newest_rows(tx, select(table).where(table.c.session == session), table.c.log_offset)


async def _newest_rows(tx: AsyncConnection, query: Select[Any], order: ColumnElement[Any]) -> list[Row]:
    return await read_rows(tx, query.order_by(order.desc()).limit(_SESSION_ROWS_MAX))


async def steps(tx: AsyncConnection, model: str, limit: int = 400) -> list[Row]:
    """Return the last training steps of a model in its latest lineage (`latest_lineage`), the oldest first."""
    table, number = tables.steps, (await numbers_of(tx, [model])).get(model, 0)
    query = select(table).where(table.c.model == number).order_by(table.c.at_us.desc()).limit(limit)
    rows = await read_rows(tx, query)
    texts = await texts_of(tx, {value for row in rows for value in (row["lineage"], row["version"])})
    latest = rows[0]["lineage"] if rows else 0
    return [
        {**row, "lineage": texts[row["lineage"]], "version": texts.get(row["version"] or 0)}
        for row in reversed(rows)
        if row["lineage"] == latest
    ]
