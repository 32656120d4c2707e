"""The list of sessions: pages after and before a position, with filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.queries import (
    PAGE_ROWS,
    SEARCHED_MAX,
    Row,
    numbers_of,
    numbers_of_versions,
    read_rows,
)

Position = tuple[int, int]
"""Time and number of a row in a list."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on the sessions of a page. A condition that is None holds for all sessions.

    `version` may be shortened as in `numbers_of_versions`. The page begins after the position `after` in the list, or
    ends before the position `before`.
    """

    model: str | None = None
    version: str | None = None
    arm: str | None = None
    thumb: int | None = None
    reward_max: float | None = None
    outcome: str | None = None
    status: str | None = None
    task: str | None = None
    since_ms: int | None = None
    edited: bool = False
    hides_evaluation: bool = False
    after: Position | None = None
    before: Position | None = None


@dataclass(frozen=True, slots=True)
class SessionPage:
    """One page of the list of sessions, the newest first, with the positions of the neighbouring pages."""

    rows: Sequence[Row]
    after: Position | None
    """Position after which the next page begins, or None at the end."""
    before: Position | None
    """Position before which the previous page ends, or None at the newest session."""
    searched_until_ms: int | None
    """Beginning of the last session that was read, if the search stopped before the page was full."""


async def session_page(tx: AsyncConnection, tenant: int, selection: Filter) -> SessionPage:
    """Return one page of a tenant's sessions.

    The sessions are read through an index of one condition, the time and the position. The other conditions are checked
    on at most `SEARCHED_MAX` of these sessions.
    """
    table = tables.sessions
    conditions = _conditions(selection)
    if selection.model is not None:
        conditions["model"] = table.c.model.in_((await numbers_of(tx, [selection.model])).values())
    if selection.version is not None:
        conditions["version"] = table.c.version.in_(await numbers_of_versions(tx, selection.version))
    indexed = next((name for name in ("edits", "task_id", "version", "thumb", "status") if name in conditions), None)
    query = select(table).where(table.c.tenant == tenant, table.c.began_ms > max(0, (selection.since_ms or 0) - 1))
    if indexed is not None:
        query = query.where(conditions.pop(indexed))
    columns, is_backward = (table.c.began_ms, table.c.id), selection.before is not None
    if selection.before is not None:
        query = query.where(tuple_(*columns) > tuple_(*selection.before))
    elif selection.after is not None:
        query = query.where(tuple_(*columns) < tuple_(*selection.after))
    nearest = query.order_by(*_order_by(columns, is_ascending=is_backward))
    if not conditions:
        return _page(await read_rows(tx, nearest.limit(PAGE_ROWS + 1)), selection)
    read = nearest.with_only_columns(*columns).limit(SEARCHED_MAX).subquery()
    read_columns = read.c.began_ms, read.c.id
    matching = select(table).join(read, read.c.id == table.c.id).where(*conditions.values())
    matching = matching.order_by(*_order_by(read_columns, is_ascending=is_backward)).limit(PAGE_ROWS + 1)
    rows = await read_rows(tx, matching)
    if len(rows) > PAGE_ROWS:
        return _page(rows, selection)
    last = select(*read_columns, select(func.count()).select_from(read).scalar_subquery().label("size"))
    end = (await tx.execute(last.order_by(*_order_by(read_columns, is_ascending=not is_backward)).limit(1))).first()
    if end is None or end.size < SEARCHED_MAX:
        return _page(rows, selection)
    return _page(rows, selection, (end.began_ms, end.id))


def _order_by(columns: Sequence[ColumnElement[int]], *, is_ascending: bool) -> list[ColumnElement[int]]:
    return [column.asc() if is_ascending else column.desc() for column in columns]


def _page(rows: Sequence[Row], selection: Filter, searched: Position | None = None) -> SessionPage:
    """Build one page of the list of sessions, with the positions of the neighbouring pages.

    Args:
        rows: sessions in list order from the filter's position on; if more sessions follow, one more than fits on a
            page.
        selection: the filter.
        searched: position at which the search stopped before the page was full.
    """
    page = rows[:PAGE_ROWS]
    first, last = ((page[at]["began_ms"], page[at]["id"]) if page else None for at in (0, -1))
    end = last if len(rows) > PAGE_ROWS else searched
    until_ms = searched[0] if searched is not None else None
    if selection.before is not None:
        ms, number = selection.before
        return SessionPage(page[::-1], first or (ms, number + 1), end, until_ms)
    if selection.after is not None and first is None:
        ms, number = selection.after
        first = ms, max(0, number - 1)
    return SessionPage(page, end, first if selection.after is not None else None, until_ms)


def _conditions(selection: Filter) -> dict[str, ColumnElement[bool]]:
    """Return the SQL conditions of a filter by the column that they use, except those for model and version."""
    table, conditions = tables.sessions, {}
    if selection.task is not None:
        conditions["task_id"] = table.c.task_id == selection.task
    if selection.thumb is not None:
        conditions["thumb"] = table.c.thumb == selection.thumb
    if selection.status is not None:
        conditions["status"] = table.c.status == tables.STATUSES.index(selection.status)
    if selection.reward_max is not None:
        conditions["reward"] = table.c.reward <= selection.reward_max
    for name, flag in (("arm", selection.arm), ("outcome", selection.outcome)):
        if flag is not None:
            conditions[name] = table.c.flags.bitwise_and(tables.FLAGS[flag]) != 0
    if selection.edited:
        conditions["edits"] = table.c.edits.is_not(None)
    if selection.hides_evaluation:
        conditions["evaluation"] = tables.is_no_evaluation(table.c.flags)
    return conditions
