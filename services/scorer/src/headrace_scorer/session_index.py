"""Reads the closed trajectories and the feedback of a session that decide the match of one event or trajectory.

A session may have any number of both, because clients may use its id for ever. No read may cost more than the logarithm
of their number. Therefore only the neighbours of a trajectory, by beginning and by closing time, are read: they decide
which feedback is about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, func, or_, select
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
            times = [await self._time_after(epoch_ms(placed.event.time))]
        else:
            peers = [*await self._firsts(), *await self._last_before(placed.turns_until, placed.trajectories_until)]
            times = [peer.time_ms for peer in peers]
            return ClosedRuns({*peers, *await self._closed_at(times)})
        return ClosedRuns(await self._closed_at(times))

    async def peers_at(self, time_ms: int, new: ClosedTrajectory | None, *, by_time: bool) -> ClosedRuns:
        """Return the closed trajectories that decide which feedback is about those closed at `time_ms`.

        Args:
            time_ms: closing time.
            new: a new trajectory with this closing time, or None. If given, the result also contains the trajectories
                from which it may take over feedback.
            by_time: whether the session has feedback without offsets, which is matched by its time.
        """
        if new is not None and new.began is None and await self._is_first_ingested(new):
            return ClosedRuns(
                await self._read(self._query())
            )  # once in a session, because its feedback may come from any other trajectory
        peers = {*await self._closed_at([time_ms]), *await self._successors(time_ms), *await self._firsts()}
        times: set[int | None] = set()
        if new is not None:
            before = await self._last_before(new.began, new.offset if new.began is None else None)
            before = before or [*await self._first_after(new), *await self._firsts()]
            peers |= {new, *before}
            times |= {peer.time_ms for peer in before}
        if by_time:
            times |= {
                await self._extreme(func.max, trajectories.c.time_ms < time_ms),
                await self._time_after(time_ms + 1),
            }
        return ClosedRuns(peers | set(await self._closed_at(times)))

    def _query(self, *conditions: Condition) -> Select[Any]:
        session_key, tenant = self.session
        table = trajectories.c
        return select(*_PEER).where(table.session_key == session_key, table.tenant == tenant, *conditions)

    async def _read(self, query: Select[Any]) -> list[ClosedTrajectory]:
        return [ClosedTrajectory(*row) for row in await self.tx.execute(query)]

    async def _closed_at(self, times: Iterable[int | None]) -> list[ClosedTrajectory]:
        """Return the trajectories that were closed at one of these times."""
        peers: list[ClosedTrajectory] = []
        for time_ms in sorted({time_ms for time_ms in times if time_ms is not None}):
            together = self._query(trajectories.c.time_ms == time_ms).order_by(trajectories.c.place.desc())
            rows = await self._read(together.limit(_TOGETHER_MAX))
            if len(rows) == _TOGETHER_MAX:
                log.warning("closed_together_limit", session=self.session[0], most=_TOGETHER_MAX)
            peers += rows
        return peers

    async def _firsts(self) -> list[ClosedTrajectory]:
        """Return the first captured and the first ingested trajectory of the session."""
        table = trajectories.c
        captured = self._query(table.began.is_not(None)).order_by(table.began, *_PEER).limit(1)
        ingested = self._query(table.began.is_(None)).order_by(table.place, *_PEER).limit(1)
        return [*await self._read(captured), *await self._read(ingested)]

    async def _last_before(self, turns_until: int | None, trajectories_until: int | None) -> list[ClosedTrajectory]:
        """Return the last captured trajectory that began before the offset `turns_until`, and the last ingested one
        before `trajectories_until`; neither for an offset of None.
        """
        table = trajectories.c
        peers: list[ClosedTrajectory] = []
        if turns_until is not None:
            captured = self._query(table.began < turns_until)
            peers += await self._read(captured.order_by(table.began.desc(), *_DESCENDING).limit(1))
        if trajectories_until is not None:
            ingested = self._query(table.began.is_(None), table.place < trajectories_until)
            peers += await self._read(ingested.order_by(table.place.desc(), *_DESCENDING).limit(1))
        return peers

    async def _first_after(self, peer: ClosedTrajectory) -> list[ClosedTrajectory]:
        """Return, as a list of at most one, the captured trajectory of the session that began next after `peer`."""
        later = self._query(trajectories.c.began > peer.began) if peer.began is not None else None
        return [] if later is None else await self._read(later.order_by(trajectories.c.began, *_PEER).limit(1))

    async def _successors(self, time_ms: int) -> list[ClosedTrajectory]:
        """Return, for each trajectory closed at `time_ms`, the one that began, or was ingested, next after it."""
        session_key, tenant = self.session
        table, later = trajectories.c, trajectories.alias()
        in_session = later.c.session_key == session_key, later.c.tenant == tenant
        member = self._query(table.time_ms == time_ms).order_by(table.place.desc()).limit(_TOGETHER_MAX).subquery()
        next_began = select(func.min(later.c.began)).where(*in_session, later.c.began > member.c.began)
        next_place = select(func.min(later.c.place)).where(
            *in_session, later.c.began.is_(None), later.c.place > member.c.place
        )
        captured = select(next_began.scalar_subquery()).where(member.c.began.is_not(None))
        ingested = select(next_place.scalar_subquery()).where(member.c.began.is_(None))
        return [
            *await self._read(self._query(table.began.in_(captured))),
            *await self._read(self._query(table.began.is_(None), table.place.in_(ingested))),
        ]

    async def _time_after(self, time_ms: int) -> int | None:
        """Return the first closing time from `time_ms` on, or the last closing time if there is none."""
        after = await self._extreme(func.min, trajectories.c.time_ms >= time_ms)
        return await self._extreme(func.max) if after is None else after

    async def _extreme(self, extreme: Any, *conditions: Condition) -> int | None:
        session_key, tenant = self.session
        table = trajectories.c
        in_session = table.session_key == session_key, table.tenant == tenant
        time_ms: int | None = await self.tx.scalar(select(extreme(table.time_ms)).where(*in_session, *conditions))
        return time_ms

    async def _is_first_ingested(self, new: ClosedTrajectory) -> bool:
        earlier = self._query(trajectories.c.began.is_(None), trajectories.c.place < new.offset).limit(1)
        return not await self._read(earlier)


_DESCENDING = tuple(column.desc() for column in _PEER)


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

    async def exists(self) -> bool:
        """Return whether there is feedback about the session as a whole."""
        return await self.tx.scalar(self._query().limit(1)) is not None

    async def placed_by_time(self, most: int) -> list[FeedbackPosition]:
        """Return the positions of the newest `most` feedback events that came without offsets from a gateway.

        Only the times of such events show which run they are about. If there are more such events, one more is
        returned.
        """
        query = self._query(feedback.c.turns_until.is_(None)).order_by(feedback.c.place.desc())
        return await self._read(query.limit(most + 1))

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
    by_time: dict[Session, list[FeedbackPosition]] = {}
    together: dict[tuple[Session, int], tuple[ClosedRuns, list[FeedbackPosition]]] = {}
    for trajectory in stored:
        session, row = session_of(trajectory), rows[trajectory.trajectory_id]
        about = SessionFeedback(tx, session)
        if session not in by_time and await about.exists():
            by_time[session] = await about.placed_by_time(by_time_max)
        if session not in by_time:
            positions[row.trajectory_id] = ClosedRuns(()), []
            continue
        key = session, row.time_ms
        if is_new or key not in together:
            new = row if is_new else None
            neighbours = ClosedNeighbours(tx, session)
            peers = await neighbours.peers_at(row.time_ms, new, by_time=bool(by_time[session]))
            ranges = peers.ranges(row.time_ms, row.trajectory_id if is_new else "")
            together[key] = peers, [*await about.placed_in(ranges), *by_time[session]]
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
