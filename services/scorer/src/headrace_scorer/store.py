"""The scorer's stored trajectories and feedback. Functions run in their caller's transaction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import RowMapping, bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process.event_loop import run_off_loop
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.tables import insert_new, split_into_batches, upsert
from headrace_schemas import DeadLetter, Feedback, Trajectory
from headrace_schemas.values.text import printable
from headrace_scorer.feedback_entries import Answer
from headrace_scorer.feedback_matching import EVENTS_MAX, PlacedFeedback
from headrace_scorer.schema import feedback, listed, trajectories, turn_owners, turns

log = get_logger(__name__)
_CACHED_MAX = 256
_CACHED_BYTES_MAX = 2 << 20
"""JSON bytes of the trajectories in memory. Each full garbage collection visits all their objects, on the event loop:
9 MB of trajectories with many short messages are half a million objects and 0.1 s."""
_TURNS_AT_ONCE = 500
"""Largest number of turns in one SQL statement."""
_EVENTS_AT_ONCE = 500
"""Largest number of feedback events in one SQL statement."""
_STATE = [column for column in trajectories.c if column.name != "payload"]
Task = tuple[str, str]
"""Tenant and id of a task."""


class TrajectoryCache:
    """Cache of the newest trajectories by id, which saves reading a trajectory from the database soon after its
    arrival.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[str, tuple[Trajectory, int]] = OrderedDict()
        self._size_bytes = 0

    def add(self, trajectory: Trajectory, size_bytes: int) -> None:
        """Add a trajectory to the cache unless it is too large.

        Args:
            trajectory: the trajectory.
            size_bytes: size of its JSON.
        """
        name = trajectory.trajectory_id
        self._size_bytes -= self._recent.pop(name, (trajectory, 0))[1]
        if size_bytes > _CACHED_BYTES_MAX:
            return
        self._recent[name] = trajectory, size_bytes
        self._size_bytes += size_bytes
        while len(self._recent) > _CACHED_MAX or self._size_bytes > _CACHED_BYTES_MAX:
            self._size_bytes -= self._recent.popitem(last=False)[1][1]

    async def get(self, tx: AsyncConnection, trajectory_ids: Iterable[str]) -> dict[str, Trajectory]:
        """Return trajectories by id from the cache or else from the database.

        Ids that the database lacks are left out.
        """
        ids = set(trajectory_ids)
        cached = {name: self._recent[name][0] for name in ids & self._recent.keys()}
        missing = ids - cached.keys()
        if not missing:
            return cached
        query = select(trajectories.c.trajectory_id, trajectories.c.payload)
        loaded = {}
        for name, payload in await tx.execute(query.where(trajectories.c.trajectory_id.in_(missing))):
            loaded[name] = await run_off_loop(len(payload), partial(Trajectory.from_stored, payload))
            self.add(loaded[name], len(payload))
        return cached | loaded


async def payload_sizes(tx: AsyncConnection, trajectory_ids: Iterable[str]) -> dict[str, int]:
    """Return the size in bytes of each stored trajectory among `trajectory_ids`."""
    column = trajectories.c.trajectory_id
    query = select(column, func.length(trajectories.c.payload)).where(column.in_(set(trajectory_ids)))
    return dict((await tx.execute(query)).all())


async def add_trajectory(
    tx: AsyncConnection, now: datetime, trajectory: Trajectory, offset: int, partition: int, wait_s: float
) -> dict[str, Any] | None:
    """Store a trajectory. A trajectory that can be trained then waits `wait_s` for its rewards.

    Returns:
        The new row without its payload, or None if the trajectory was stored before.

    Raises:
        InvalidEvent: another tenant has a trajectory with this id, or another trajectory has one of its turns.
    """
    waits = trajectory.purpose == "train" and trajectory.untrained is None and trajectory.branches
    row = {
        "session_key": trajectory.session_key,
        "tenant": trajectory.tenant,
        "time_ms": epoch_ms(trajectory.time),
        "place": offset,
        "began": trajectory.turns_from,
        "arrived_ms": epoch_ms(now),
        "settle_ms": epoch_ms(now + timedelta(seconds=wait_s)) if waits else None,
        "inputs": "",
        "scored_inputs": None,
        "task_id": trajectory.task_id,
        "run_id": trajectory.run_id,
        "partition": partition,
        "rematch": False,
        "parts": trajectory.parts,
        "emitted": "[]",
    }
    key = {"trajectory_id": trajectory.trajectory_id}
    if not await upsert(tx, trajectories, key, {**row, "payload": trajectory.to_json()}, update=False):
        owner = await tx.scalar(select(trajectories.c.tenant).filter_by(**key))
        if owner not in (None, trajectory.tenant):
            text = (
                f"trajectory_id = {printable(trajectory.trajectory_id)!r}: another tenant has a trajectory with this id"
            )
            raise InvalidEvent("trajectory_taken", text)
        return None
    await _claim_turns(tx, trajectory)
    in_branches = set(branch_turns(trajectory))
    rows = [
        {"turn_id": turn, "trajectory_id": trajectory.trajectory_id, "spoken": turn in in_branches}
        for turn in trajectory.turn_ids
    ]
    if rows:
        await tx.execute(insert(turns), rows)
    return row


async def _claim_turns(tx: AsyncConnection, trajectory: Trajectory) -> None:
    """Record the trajectory as the owner of its turns within its tenant.

    Turns are claimed in the order of their ids, so that two replicas cannot deadlock. They are claimed in chunks,
    because an ingested trajectory may have thousands.

    Raises:
        InvalidEvent: another trajectory of the tenant owns one of the turns.
    """
    if not trajectory.turn_ids:
        return
    taking = insert_new(tx, turn_owners, ("tenant", "turn_id"))
    for some in split_into_batches(sorted(trajectory.turn_ids), _TURNS_AT_ONCE):
        names = {"tenant": trajectory.tenant, "trajectory_id": trajectory.trajectory_id}
        await tx.execute(taking, [{**names, "turn_id": turn} for turn in some])
        query = select(turn_owners.c.turn_id, turn_owners.c.trajectory_id).where(
            turn_owners.c.tenant == trajectory.tenant,
            turn_owners.c.turn_id.in_(some),
            turn_owners.c.trajectory_id != trajectory.trajectory_id,
        )
        conflict = (await tx.execute(query.order_by(turn_owners.c.turn_id).limit(1))).first()
        if conflict is not None:
            text = f"turn {conflict[0]!r} belongs to trajectory {conflict[1]!r}; a turn is in one trajectory only"
            raise InvalidEvent("turn_taken", text)


def branch_turns(trajectory: Trajectory) -> list[str]:
    """Return the ids of the turns that are in a branch, in the order of the branches."""
    return list(dict.fromkeys(turn for branch in trajectory.branches for turn in branch.turn_ids))


def branch_answers(trajectory: Trajectory) -> frozenset[Answer]:
    """Return the answers that are in a branch: pairs of turn and choice."""
    return frozenset((span.turn_id, span.choice) for branch in trajectory.branches for span in branch.spans)


async def lock_rows(tx: AsyncConnection, trajectory_ids: Iterable[str]) -> dict[str, RowMapping]:
    """Return the rows of the stored trajectories without their payloads, locked until the transaction ends.

    They are locked in the order of their ids, so that two replicas that lock the same rows cannot deadlock.
    """
    column = trajectories.c.trajectory_id
    query = select(*_STATE).where(column.in_(set(trajectory_ids))).order_by(column).with_for_update()
    return {row["trajectory_id"]: row for row in (await tx.execute(query)).mappings()}


async def update_rows(tx: AsyncConnection, changes: Mapping[str, Mapping[str, object]]) -> None:
    """Update columns in the rows of several trajectories. `changes` has the new values by trajectory id."""
    rows_by_columns: dict[tuple[str, ...], list[dict[str, object]]] = {}
    for trajectory_id, values in changes.items():
        row = {f"new_{name}": value for name, value in sorted(values.items())}
        rows_by_columns.setdefault(tuple(sorted(values)), []).append({**row, "changed_id": trajectory_id})
    for names, rows in rows_by_columns.items():
        values = {name: bindparam(f"new_{name}") for name in names}
        changed = trajectories.c.trajectory_id == bindparam("changed_id")
        await tx.execute(update(trajectories).where(changed).values(values), rows)


async def add_feedback(tx: AsyncConnection, now: datetime, name: str, placed: PlacedFeedback, partition: int) -> None:
    """Store feedback under the key `name`, which is unique across all tenants (`Received.identity`)."""
    event = placed.event
    of_task = event.level == "task"
    row = {
        "session_key": event.session_key,
        "tenant": event.tenant,
        "lists_turns": bool(event.msg_ids),
        "place": placed.offset,
        "turns_until": placed.turns_until,
        "trajectories_until": placed.trajectories_until,
        "task_id": event.task_id if of_task else None,
        "partition": partition if of_task else None,
        "arrived_ms": epoch_ms(now),
        "payload": event.to_json(),
    }
    if await upsert(tx, feedback, {"event_id": name}, row, update=False) and event.msg_ids:
        rows = [{"turn_id": turn, "event_id": name} for turn in dict.fromkeys(event.msg_ids)]
        await tx.execute(insert(listed), rows)
        await _forget_old_listings(tx, event.msg_ids)


async def _forget_old_listings(tx: AsyncConnection, turn_ids: Collection[str]) -> None:
    """Delete, for turns that much feedback lists, the rows that link the oldest feedback to the turn.

    Of the feedback that lists turns of a trajectory, only the newest `EVENTS_MAX` events count. The rows of a turn are
    reduced to that number once there are twice as many, so that new feedback about a turn does not read all earlier
    ones.
    """
    for part in split_into_batches(sorted(set(turn_ids)), _TURNS_AT_ONCE):
        counts = select(listed.c.turn_id).where(listed.c.turn_id.in_(part)).group_by(listed.c.turn_id)
        for turn_id in (await tx.execute(counts.having(func.count() > 2 * EVENTS_MAX))).scalars().all():
            ordered = select(listed.c.event_id).join(feedback, feedback.c.event_id == listed.c.event_id)
            ordered = ordered.where(listed.c.turn_id == turn_id).order_by(feedback.c.place.desc(), feedback.c.event_id)
            newest = ordered.limit(EVENTS_MAX)
            await tx.execute(delete(listed).where(listed.c.turn_id == turn_id, listed.c.event_id.not_in(newest)))


async def load_feedback(tx: AsyncConnection, names: Iterable[str]) -> dict[str, PlacedFeedback]:
    """Return the stored feedback with these names.

    Feedback that an older release accepted but the present rules refuse is left out.
    """
    table = feedback.c
    columns = table.event_id, table.payload, table.place, table.turns_until, table.trajectories_until
    records: dict[str, PlacedFeedback] = {}
    for part in split_into_batches(sorted(set(names)), _EVENTS_AT_ONCE):
        query = select(*columns).where(table.event_id.in_(part))
        for name, payload, place, turns_until, trajectories_until in await tx.execute(query):
            try:
                event = await run_off_loop(len(payload), partial(Feedback.from_stored, payload))
            except InvalidEvent as error:
                log.warning("stored_feedback_left_out", place=place, error=str(error))
                continue
            records[name] = PlacedFeedback(event, place, turns_until, trajectories_until, len(payload))
    return records


async def trajectories_with(tx: AsyncConnection, turn_ids: Collection[str], tenant: str) -> Sequence[str]:
    """Return the ids of a tenant's trajectories that contain one of these turns."""
    query = (
        select(turns.c.trajectory_id)
        .join(trajectories, trajectories.c.trajectory_id == turns.c.trajectory_id)
        .where(turns.c.turn_id.in_(turn_ids), trajectories.c.tenant == tenant)
        .distinct()
        .order_by(turns.c.trajectory_id)
    )
    return list((await tx.execute(query)).scalars())


async def fail_scoring(tx: AsyncConnection, trajectory_id: str, error: str) -> list[DeadLetter]:
    """End the scoring of a trajectory whose experiences cannot be computed, and return its dead letter.

    The list is empty if the trajectory is not stored any more.

    Args:
        tx: the transaction.
        trajectory_id: the trajectory.
        error: message for the dead letter.
    """
    table = trajectories.c
    query = select(table.partition, table.place, table.session_key, table.payload)
    row = (await tx.execute(query.where(table.trajectory_id == trajectory_id))).one_or_none()
    if row is None:
        return []
    await update_rows(tx, {trajectory_id: {"settle_ms": None, "rematch": False}})
    partition = -1 if row.partition is None else row.partition
    headers = (("ce_id", trajectory_id.encode("utf-8", "replace")),)
    record = Record("trajectories", partition, row.place, row.session_key.encode(), row.payload, headers)
    return [dead_letter("scorer", record, "scoring_failed", error)]
