"""Rematches of stored trajectories: which ones are matched with their feedback again, a bounded number at a time.

A task may have any number of runs. Feedback about it adds one row to `task_rematches`, which a timer takes through the
runs of the task in the order of their ids. New feedback about the same task extends this round to the position that it
has reached, so a stream of feedback does not keep it from later runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_scorer.schema import REMATCH, task_rematches, trajectories

_ROWS = task_rematches.c


async def add_task(tx: AsyncConnection, tenant: str, task_id: str, partition: int) -> None:
    """Request a rematch of all runs of a task that are stored in `partition`, because of new feedback about it."""
    key = {"tenant": tenant, "task_id": task_id, "partition": partition}
    again = update(task_rematches).filter_by(**key).values(until=_ROWS.after, wrapped=False)
    if (await tx.execute(again)).rowcount == 0:
        turn = await _next_turn(tx, tenant)
        await tx.execute(insert(task_rematches).values(**key, after="", until="", wrapped=False, turn=turn))


async def _next_turn(tx: AsyncConnection, tenant: str) -> int:
    """Return the position in the service order for a row of `tenant` that was added, or from which runs were taken.

    The rows of one tenant get successive positions, so that tenants with few tasks do not wait for others.
    """
    first = await tx.scalar(select(func.min(_ROWS.turn)))
    last = await tx.scalar(select(func.max(_ROWS.turn)).where(_ROWS.tenant == tenant))
    return int(max(first or 0, last or 0)) + 1


async def take(tx: AsyncConnection, most: int) -> tuple[Sequence[str], bool]:
    """Take up to `most` stored trajectories that must be matched with their feedback again.

    Trajectories with the mark `rematch` come first, then the runs of the tasks in `task_rematches`. The marks are
    deleted, and the rows of the tasks are moved past the taken runs, so that the next call returns others.

    Returns:
        The ids of the trajectories, each once, and whether there may be more.
    """
    names = await _take_marked(tx, most)
    while len(names) < most:
        row = await _first_task(tx)
        if row is None:
            return list(dict.fromkeys(names)), False
        names += await _take_of_task(tx, row, most - len(names))
    return list(dict.fromkeys(names)), True


async def _take_marked(tx: AsyncConnection, most: int) -> list[str]:
    marked = select(trajectories.c.trajectory_id).where(REMATCH).order_by(trajectories.c.trajectory_id).limit(most)
    names = list((await tx.execute(marked.with_for_update(skip_locked=True))).scalars())
    if names:
        await tx.execute(update(trajectories).where(trajectories.c.trajectory_id.in_(names)).values(rematch=False))
    return names


async def _first_task(tx: AsyncConnection) -> Row[Any] | None:
    query = select(task_rematches).order_by(_ROWS.turn, *task_rematches.primary_key).limit(1)
    return (await tx.execute(query.with_for_update(skip_locked=True))).one_or_none()


async def _take_of_task(tx: AsyncConnection, row: Row[Any], most: int) -> Sequence[str]:
    """Return the next `most` runs of a task, and move its position past them; delete its row after the last one."""
    table = trajectories.c
    of_task = table.tenant == row.tenant, table.task_id == row.task_id, table.partition == row.partition
    query = select(table.trajectory_id).where(*of_task, table.trajectory_id > row.after)
    query = query.where(table.trajectory_id <= row.until) if row.wrapped else query
    names = list((await tx.execute(query.order_by(table.trajectory_id).limit(most))).scalars())
    this_row = {"tenant": row.tenant, "task_id": row.task_id, "partition": row.partition}
    if len(names) == most:
        values: dict[str, object] = {"after": names[-1], "turn": await _next_turn(tx, row.tenant)}
    elif row.until and not row.wrapped:
        values = {"after": "", "wrapped": True}
    else:
        await tx.execute(delete(task_rematches).filter_by(**this_row))
        return names
    await tx.execute(update(task_rematches).filter_by(**this_row).values(**values))
    return names
