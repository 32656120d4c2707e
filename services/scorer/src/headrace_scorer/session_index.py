"""Reads the closed trajectories and the feedback of a session that decide the match of one event or trajectory.

A session may have any number of both, because clients may use its id for ever. No read may cost more than the logarithm
of their number. Therefore only the neighbours of a trajectory, by beginning and by closing time, are read: they decide
which feedback is about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Executable,
    Integer,
    Select,
    bindparam,
    func,
    or_,
    select,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.tables import is_one_of
from headrace_schemas import Trajectory
from headrace_scorer.feedback_matching import (
    ClosedRuns,
    ClosedTrajectory,
    FeedbackPosition,
    FeedbackRange,
    PlacedFeedback,
)
from headrace_scorer.schema import feedback, listed, trajectories, turns

log = get_logger(__name__)
Session = tuple[str, str]
"""Key and tenant of a session."""
_TOGETHER_MAX = 1024
"""Largest number of trajectories that count as closed together, the newest ones. A session closes fewer, but the
authors of ingested trajectories choose their times."""
_PLACED_MAX = 1024
"""Largest number of feedback events that are read of one range, the newest ones. Of these `EVENTS_MAX` count."""
_PEER = tuple(trajectories.c[name] for name in ("trajectory_id", "time_ms", "place", "began"))
"""The columns of a `ClosedTrajectory`."""
POSITION = (
    feedback.c.event_id,
    feedback.c.place,
    feedback.c.turns_until,
    feedback.c.trajectories_until,
    func.length(feedback.c.payload),
)
"""The columns of a `FeedbackPosition`."""
Condition = ColumnElement[bool]
_CLOSED = trajectories.c
_DESCENDING = tuple(column.desc() for column in _PEER)


def _peers(*conditions: Condition) -> Select[Any]:
    """Return the query of those trajectories of the session `:session_key` that match the conditions."""
    in_session = _CLOSED.session_key == bindparam("session_key"), _CLOSED.tenant == bindparam("tenant")
    return select(*_PEER).where(*in_session, *conditions)


def _united(*queries: Select[Any]) -> CompoundSelect[Any]:
    """Return one statement for several queries of which each reads a bounded part of an index."""
    return union_all(*(select(query.subquery()) for query in queries))


# The statements are built once: to build one takes longer than its execution.
_TOGETHER = _peers(_CLOSED.time_ms == bindparam("time_ms")).order_by(_CLOSED.place.desc()).limit(_TOGETHER_MAX)
"""The trajectories that were closed at `:time_ms`."""
_FIRSTS = (
    _peers(_CLOSED.began.is_not(None)).order_by(_CLOSED.began, *_PEER).limit(1),
    _peers(_CLOSED.began.is_(None)).order_by(_CLOSED.place, *_PEER).limit(1),
)
"""The first captured and the first ingested trajectory of the session."""
_LAST_BEFORE = (
    _peers(_CLOSED.began < bindparam("turns_until")).order_by(_CLOSED.began.desc(), *_DESCENDING).limit(1),
    _peers(_CLOSED.began.is_(None), _CLOSED.place < bindparam("trajectories_until"))
    .order_by(_CLOSED.place.desc(), *_DESCENDING)
    .limit(1),
)
"""The last captured trajectory that began before an offset, and the last ingested one."""


def _successors() -> tuple[Select[Any], Select[Any]]:
    """Return the queries of the trajectories that began, or were ingested, next after each one that was closed at
    `:time_ms`."""
    later, member = trajectories.alias(), _TOGETHER.subquery()
    in_session = later.c.session_key == bindparam("session_key"), later.c.tenant == bindparam("tenant")
    next_began = select(func.min(later.c.began)).where(*in_session, later.c.began > member.c.began)
    next_place = select(func.min(later.c.place)).where(
        *in_session, later.c.began.is_(None), later.c.place > member.c.place
    )
    captured = select(next_began.scalar_subquery()).where(member.c.began.is_not(None))
    ingested = select(next_place.scalar_subquery()).where(member.c.began.is_(None))
    return _peers(_CLOSED.began.in_(captured)), _peers(_CLOSED.began.is_(None), _CLOSED.place.in_(ingested))


_FIRST = _united(*_FIRSTS)
_LAST = _united(*_LAST_BEFORE)
_ENDS = _united(*_FIRSTS, *_LAST_BEFORE)
_AROUND = _united(_TOGETHER, *_successors(), *_FIRSTS)
_WITH_ENDS = _peers(_CLOSED.time_ms.in_(select(_ENDS.subquery().c.time_ms))).limit(_TOGETHER_MAX)
"""The trajectories of `_ENDS` and those that were closed together with one of them, in no order."""


def _newest_by_time() -> CompoundSelect[Any]:
    """Return the statement of the newest `:most` positions without offsets, and of any one position in addition."""
    table = feedback.c
    of_session = table.session_key == bindparam("session_key"), table.tenant == bindparam("tenant")
    general = select(*POSITION).where(*of_session, table.lists_turns.is_(False))
    by_time = general.where(table.turns_until.is_(None)).order_by(table.place.desc())
    return _united(by_time.limit(bindparam("most", type_=Integer)), general.limit(1))


_NEWEST_BY_TIME = _newest_by_time()


def session_of(trajectory: Trajectory) -> Session:
    return trajectory.session_key, trajectory.tenant


@dataclass(frozen=True, slots=True)
class ClosedNeighbours:
    """Reader of the closed trajectories of one session."""

    tx: AsyncConnection
    session: Session

    async def peers_of(self, placed: PlacedFeedback) -> ClosedRuns:
        """Return the closed trajectories among which `target_trajectories` finds those that a feedback event is
        about.
        """
        if placed.turns_until is None:
            return ClosedRuns(await self._closed_at([await self._time_after(epoch_ms(placed.event.time))]))
        offsets = {"turns_until": placed.turns_until, "trajectories_until": placed.trajectories_until}
        peers = await self._read(_WITH_ENDS, **offsets)
        if len(peers) == _TOGETHER_MAX:
            peers = await self._read(_ENDS, **offsets)
            peers += await self._closed_at([peer.time_ms for peer in peers])
        return ClosedRuns(set(peers))

    async def peers_at(self, time_ms: int, new: ClosedTrajectory | None, *, by_time: bool) -> ClosedRuns:
        """Return the closed trajectories that decide which feedback is about those closed at `time_ms`.

        Args:
            time_ms: closing time.
            new: a new trajectory with this closing time, or None. If given, the result also contains the trajectories
                from which it may take over feedback.
            by_time: whether the session has feedback without offsets, which is matched by its time.
        """
        if new is not None and new.began is None and await self._is_first_ingested(new):
            return ClosedRuns(await self._read(_peers()))  # once in a session
        peers = set(await self._read(_AROUND, time_ms=time_ms))
        self._note_limit(sum(peer.time_ms == time_ms for peer in peers))
        times: set[int | None] = set()
        if new is not None:
            ingested_until = new.offset if new.began is None else None
            before = await self._read(_LAST, turns_until=new.began, trajectories_until=ingested_until)
            before = before or [*await self._first_after(new), *await self._read(_FIRST)]
            peers |= {new, *before}
            times |= {peer.time_ms for peer in before}
        if by_time:
            times |= {
                await self._extreme(func.max, _CLOSED.time_ms < time_ms),
                await self._time_after(time_ms + 1),
            }
        return ClosedRuns(peers | set(await self._closed_at(times - {time_ms})))

    async def _read(self, query: Executable, **values: int | None) -> list[ClosedTrajectory]:
        session_key, tenant = self.session
        rows = await self.tx.execute(query, {"session_key": session_key, "tenant": tenant, **values})
        return [ClosedTrajectory(*row) for row in rows]

    async def _closed_at(self, times: Iterable[int | None]) -> list[ClosedTrajectory]:
        """Return the trajectories that were closed at one of these times."""
        peers: list[ClosedTrajectory] = []
        for time_ms in sorted({time_ms for time_ms in times if time_ms is not None}):
            rows = await self._read(_TOGETHER, time_ms=time_ms)
            self._note_limit(len(rows))
            peers += rows
        return peers

    def _note_limit(self, closed_together: int) -> None:
        if closed_together >= _TOGETHER_MAX:
            log.warning("closed_together_limit", session=self.session[0], most=_TOGETHER_MAX)

    async def _first_after(self, peer: ClosedTrajectory) -> list[ClosedTrajectory]:
        """Return, as a list of at most one, the captured trajectory of the session that began next after `peer`."""
        later = _peers(_CLOSED.began > peer.began) if peer.began is not None else None
        return [] if later is None else await self._read(later.order_by(_CLOSED.began, *_PEER).limit(1))

    async def _time_after(self, time_ms: int) -> int | None:
        """Return the first closing time from `time_ms` on, or the last closing time if there is none."""
        after = await self._extreme(func.min, _CLOSED.time_ms >= time_ms)
        return await self._extreme(func.max) if after is None else after

    async def _extreme(self, extreme: Any, *conditions: Condition) -> int | None:
        session_key, tenant = self.session
        in_session = _CLOSED.session_key == session_key, _CLOSED.tenant == tenant
        time_ms: int | None = await self.tx.scalar(select(extreme(_CLOSED.time_ms)).where(*in_session, *conditions))
        return time_ms

    async def _is_first_ingested(self, new: ClosedTrajectory) -> bool:
        return not await self._read(_peers(_CLOSED.began.is_(None), _CLOSED.place < new.offset).limit(1))


async def closed_rows(tx: AsyncConnection, trajectory_ids: Collection[str]) -> dict[str, ClosedTrajectory]:
    """Return, by id, the times and offsets of the stored trajectories with these ids."""
    rows = await tx.execute(select(*_PEER).where(trajectories.c.trajectory_id.in_(trajectory_ids)))
    return {row[0]: ClosedTrajectory(*row) for row in rows}


async def listing_positions(tx: AsyncConnection, stored: Sequence[Trajectory]) -> dict[str, list[FeedbackPosition]]:
    """Return, for each stored trajectory, the positions of the feedback of its tenant that lists its turns.

    A run with several sessions has a copy of its feedback in each session. Only the copies in the session of the
    trajectory count.
    """
    sessions = {trajectory.trajectory_id: session_of(trajectory) for trajectory in stored}
    table = feedback.c
    listings = (
        select(table.session_key, table.tenant, *POSITION, turns.c.trajectory_id)
        .join(listed, listed.c.event_id == table.event_id)
        .join(turns, turns.c.turn_id == listed.c.turn_id)
        .where(is_one_of(table.session_key, table.tenant, set(sessions.values())))
        .where(turns.c.trajectory_id.in_(sessions))
    )
    positions: dict[str, list[FeedbackPosition]] = {name: [] for name in sessions}
    for session_key, tenant, *row, name in await tx.execute(listings.distinct()):
        if (session_key, tenant) == sessions[name]:
            positions[name].append(FeedbackPosition(*row))
    return positions


@dataclass(frozen=True, slots=True)
class SessionFeedback:
    """Reader of the feedback about one session as a whole."""

    tx: AsyncConnection
    session: Session

    async def placed_by_time(self, most: int) -> list[FeedbackPosition] | None:
        """Return the positions of the newest `most` feedback events that came without offsets from a gateway.

        Only the times of such events show which run they are about. If there are more such events, one more is
        returned. The result is None if there is no feedback about the session as a whole.
        """
        session_key, tenant = self.session
        parameters = {"session_key": session_key, "tenant": tenant, "most": most + 1}
        rows = await self.tx.execute(_NEWEST_BY_TIME, parameters)
        positions = {row[0]: FeedbackPosition(*row) for row in rows}
        return [item for item in positions.values() if item.turns_until is None] if positions else None

    async def placed_in(self, ranges: Iterable[FeedbackRange]) -> list[FeedbackPosition]:
        """Return the positions of the newest `_PLACED_MAX` feedback events in each range."""
        positions: dict[str, FeedbackPosition] = {}
        for item in ranges:
            order = (feedback.c.turns_until if item.is_of_turns else feedback.c.trajectories_until).desc()
            query = self._query(feedback.c.turns_until.is_not(None), *_conditions(item))
            query = query.order_by(order, feedback.c.place.desc())
            rows = await self._read(query.limit(_PLACED_MAX))
            positions |= {row.name: row for row in rows}
        return list(positions.values())

    def _query(self, *conditions: Condition) -> Select[Any]:
        session_key, tenant = self.session
        table = feedback.c
        of_session = table.session_key == session_key, table.tenant == tenant, table.lists_turns.is_(False)
        return select(*POSITION).where(*of_session, *conditions)

    async def _read(self, query: Select[Any]) -> list[FeedbackPosition]:
        return [FeedbackPosition(*row) for row in await self.tx.execute(query)]


def _conditions(item: FeedbackRange) -> list[Condition]:
    column = feedback.c.turns_until if item.is_of_turns else feedback.c.trajectories_until
    conditions: list[Condition] = []
    if item.after is not None:
        conditions.append(column > item.after)
    if item.until is not None:
        conditions.append(
            column <= item.until if item.after is not None else or_(column <= item.until, column.is_(None))
        )
    if item.is_of_turns and item.ingested_from is not None:
        other = feedback.c.trajectories_until
        conditions.append(or_(other.is_(None), other <= item.ingested_from))
    return conditions


async def general_positions(
    tx: AsyncConnection, stored: Sequence[Trajectory], by_time_max: int, *, is_new: bool
) -> dict[str, tuple[ClosedRuns, list[FeedbackPosition]]]:
    """Return, for each trajectory, the closed trajectories around it, and the positions of feedback about its session
    that may be about it.

    Args:
        by_time_max: largest number of feedback events without offsets, which are matched by their time.
        is_new: whether the trajectories are new, so that others may lose feedback to them.
    """
    positions: dict[str, tuple[ClosedRuns, list[FeedbackPosition]]] = {}
    rows = await closed_rows(tx, [trajectory.trajectory_id for trajectory in stored])
    by_time: dict[Session, list[FeedbackPosition] | None] = {}
    together: dict[tuple[Session, int], tuple[ClosedRuns, list[FeedbackPosition]]] = {}
    for trajectory in stored:
        session, row = session_of(trajectory), rows[trajectory.trajectory_id]
        about = SessionFeedback(tx, session)
        if session not in by_time:
            by_time[session] = await about.placed_by_time(by_time_max)
        placed_by_time = by_time[session]
        if placed_by_time is None:
            positions[row.trajectory_id] = ClosedRuns(()), []
            continue
        key = session, row.time_ms
        if is_new or key not in together:
            new = row if is_new else None
            neighbours = ClosedNeighbours(tx, session)
            peers = await neighbours.peers_at(row.time_ms, new, by_time=bool(placed_by_time))
            ranges = peers.ranges(row.time_ms, row.trajectory_id if is_new else "")
            together[key] = peers, [*await about.placed_in(ranges), *placed_by_time]
        positions[row.trajectory_id] = together[key]
    return positions


async def feedback_about_tasks(
    tx: AsyncConnection, tasks: Mapping[str, tuple[str, str]]
) -> dict[str, list[FeedbackPosition]]:
    """Return, for each trajectory with a task, the positions of the newest feedback about all runs of this task.

    Each partition has a copy of such feedback. The copies in the trajectory's partition are returned, because offsets
    are ordered only within a partition.

    Args:
        tasks: tenant and task id of each trajectory.
    """
    if not tasks:
        return {}
    column, table = trajectories.c.trajectory_id, feedback.c
    partitions = dict((await tx.execute(select(column, trajectories.c.partition).where(column.in_(tasks)))).all())
    positions: dict[tuple[str, str, int | None], list[FeedbackPosition]] = {}
    for name, (tenant, task_id) in tasks.items():
        key = tenant, task_id, partitions[name]
        if key not in positions:
            of_task = table.tenant == tenant, table.task_id == task_id, table.partition == partitions[name]
            query = select(*POSITION).where(*of_task, table.task_id.is_not(None))
            rows = await tx.execute(query.order_by(table.place.desc()).limit(_PLACED_MAX))
            positions[key] = [FeedbackPosition(*row) for row in rows]
    return {name: positions[*task, partitions[name]] for name, task in tasks.items()}
