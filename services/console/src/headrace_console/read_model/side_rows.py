"""Rows of a batch for rewards, feedback, verdicts of reviews, refusals and training steps.

The status of a turn depends only on the keys of these rows.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import delete, func, insert, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import queries, review_tables, tables
from headrace_console.read_model.packing import pack_id
from headrace_console.read_model.row_sets import upsert_all, with_pauses
from headrace_console.read_model.rows import SessionRow
from headrace_console.read_model.verdicts import Verdict, belongs_to_the_random_part
from headrace_runtime.storage.tables import delete_batch, insert_new, is_one_of, split_into_batches
from headrace_schemas import DeadLetter, Event, Experience, Feedback, Reward, TrainingMetrics, Trajectory, Turn

if TYPE_CHECKING:
    from headrace_console.read_model.batch import Batch, LogEvent

_BUCKETS = 10


class RewardKey(NamedTuple):
    """Primary key of a row of the table `rewards`."""

    trajectory: int
    turn: int
    choice: int
    source: int


class HourKey(NamedTuple):
    """Primary key of a row of the table `hours`, which counts rewards."""

    tenant: int
    source: int
    hour: int
    outcome: int
    bucket: int


@dataclass(slots=True)
class HourChange:
    """Number and sum of the rewards that a batch of records adds to one row of the table `hours`."""

    rewards: int = 0
    total: float = 0.0
    """Sum of the values."""


class SideRows:
    """Rewards, feedback, verdicts, refusals and training steps that one batch changes."""

    def __init__(self, day: int) -> None:
        """Create an empty set.

        Args:
            day: the current day, in days since 1970.
        """
        self._day = day
        self.refusals: set[bytes] = set()
        """Packed ids of refused events, as far as the batch's events name them."""
        self.steps: dict[tuple[int, int], dict[str, Any]] = {}
        """New steps by lineage and save."""
        self.trained: list[dict[str, Any]] = []
        """New rows of `trained_revisions`."""
        self._feedback: list[dict[str, Any]] = []
        self._known_feedback: set[tuple[int, int, int]] = set()
        """Session, partition and offset of the stored feedback of the batch's sessions."""
        self._items: list[dict[str, Any]] = []
        self._verdicts: list[dict[str, Any]] = []
        self._known_refusals: set[bytes] = set()
        self._known_steps: set[tuple[int, int]] = set()
        self._rewards: dict[RewardKey, dict[str, Any]] = {}
        self._stored_rewards: set[RewardKey] = set()
        self._changed_rewards: set[RewardKey] = set()
        self._hours: defaultdict[HourKey, HourChange] = defaultdict(HourChange)

    async def load(self, tx: AsyncConnection, log_events: Sequence[LogEvent], batch: Batch) -> None:
        """Load the stored refusals, rewards, feedback and steps that the events may change."""
        events = [log_event.event for log_event in log_events]
        await self._load_refusals(tx, events)
        await self._load_rewards(tx, events, batch)
        await self._load_feedback(tx, log_events, batch)
        saves = {batch.save_of(event) for event in events if isinstance(event, TrainingMetrics)}
        if saves:
            table = tables.steps
            rows = await tx.execute(
                select(table.c.lineage, table.c.account).where(is_one_of(table.c.lineage, table.c.account, saves))
            )
            self._known_steps = {(row.lineage, row.account) for row in rows}

    async def _load_refusals(self, tx: AsyncConnection, events: Iterable[Event]) -> None:
        table = tables.refusals
        if await tx.scalar(select(func.min(table.c.read_day))) is None:
            return  # usually no event was refused, and the names of all events would cost much
        names = set()
        async for event in with_pauses(events):
            if isinstance(event, Turn | Trajectory | Experience):
                names.add(pack_id(event.event_id))
            if isinstance(event, Trajectory | Experience):
                names.update(map(pack_id, event.turn_ids))
            elif isinstance(event, DeadLetter):
                names.add(pack_id(event.source_id))
        for part in split_into_batches(names):
            rows = await tx.execute(select(table.c.name).where(table.c.name.in_(part)))
            self._known_refusals.update(bytes(name) for name in rows.scalars())
        self.refusals = set(self._known_refusals)

    async def _load_rewards(self, tx: AsyncConnection, events: Iterable[Event], batch: Batch) -> None:
        rewarded = set()
        async for event in with_pauses(events):
            if isinstance(event, Reward):
                rewarded.add(batch.reward_target(event)[1].id)
        query = queries.rewards_query(tables.sessions.c.tenant)
        for part in split_into_batches(rewarded):
            for row in (await tx.execute(query.where(tables.rewards.c.trajectory.in_(part)))).mappings():
                self._rewards[RewardKey(*(row[name] for name in RewardKey._fields))] = dict(row)
        self._stored_rewards = set(self._rewards)

    async def _load_feedback(self, tx: AsyncConnection, log_events: Iterable[LogEvent], batch: Batch) -> None:
        table = tables.feedback
        columns = (table.c.session, table.c.partition, table.c.log_offset)
        keys = {
            (batch.session_of(log_event.event, is_news=False).id, log_event.partition, log_event.offset)
            for log_event in log_events
            if isinstance(log_event.event, Feedback) and log_event.event.level != "task"
        }
        for part in split_into_batches(keys):
            of_sessions = table.c.session.in_({session for session, _, _ in part})
            rows = await tx.execute(select(*columns).where(of_sessions, tuple_(*columns).in_(part)))
            self._known_feedback.update((row.session, row.partition, row.log_offset) for row in rows)

    def is_new_step(self, lineage: int, account: int) -> bool:
        """Return whether the training report of this save (checkpoint of the trainer) was not read before."""
        return (lineage, account) not in self._known_steps and (lineage, account) not in self.steps

    def set_reward(self, key: RewardKey, values: dict[str, Any]) -> bool:
        """Store a reward unless an equal or higher revision is stored. Return whether it was stored."""
        stored = self._rewards.get(key)
        if stored is not None and stored["revision"] >= values["revision"]:
            return False
        if stored is not None:
            self._count_in_hour(key, stored, -1)
        row = {**key._asdict(), **values}
        self._count_in_hour(key, row, 1)
        self._rewards[key] = row
        self._changed_rewards.add(key)
        return True

    def _count_in_hour(self, key: RewardKey, row: dict[str, Any], sign: int) -> None:
        hour = self._hours[_hour_key(key, row)]
        hour.rewards += sign
        hour.total += sign * (row["value"] or 0.0)

    def add_feedback(self, session: SessionRow, partition: int, offset: int, at_ms: int) -> None:
        """Add a feedback record to its session, unless it was read before, and mark the session as changed today."""
        if (session.id, partition, offset) not in self._known_feedback:
            session.read_day = self._day
            self._feedback.append({"session": session.id, "partition": partition, "log_offset": offset, "at_ms": at_ms})

    def add_verdict(self, verdict: Verdict, session: SessionRow, turn: int, offset: int) -> None:
        """Add the rows of a verdict and of its item. A stored row of the item is not changed."""
        self._items.append(
            {
                "name": verdict.name,
                "tenant": session.tenant,
                "queue": verdict.queue,
                "position": 0,
                "session": session.id,
                "turn": turn,
                "drawn_at_random": belongs_to_the_random_part(verdict.item),
            }
        )
        self._verdicts.append(verdict.row(session.id, offset))

    async def latest_lineages(self, tx: AsyncConnection, models: Collection[int]) -> dict[int, int]:
        """Return, for each model, the lineage whose training report is the newest. Call `store_steps` first."""
        lineages = {model: await queries.latest_lineage(tx, model) for model in models}
        return {model: lineage for model, lineage in lineages.items() if lineage is not None}

    async def store_steps(self, tx: AsyncConnection) -> None:
        """Write the collected rows of training steps to the database. A row that exists already is replaced."""
        rows = [row | {"dropped": json.dumps(row["dropped"])} for row in self.steps.values()]
        await upsert_all(tx, tables.steps, ("lineage", "account"), rows)

    async def delete(self, tx: AsyncConnection, sessions: Collection[int], portion: int) -> list[bool]:
        """Delete rewards, feedback and items with their verdicts, at most `portion` of each.

        Returns:
            For each table, whether more rows remain to be deleted.
        """
        trajectories = select(tables.trajectories.c.id).where(tables.trajectories.c.session.in_(sessions))
        return [
            await delete_batch(tx, tables.rewards, tables.rewards.c.trajectory.in_(trajectories), limit=portion)
        ] + [
            await delete_batch(tx, table, table.c.session.in_(sessions), limit=portion)
            for table in (
                tables.feedback,
                review_tables.verdicts,
                review_tables.reservations,
                review_tables.items,
            )
        ]

    async def delete_trained(self, tx: AsyncConnection, experiences: Iterable[int]) -> None:
        """Delete the rows about trained revisions of these experiences."""
        table = tables.trained_revisions
        for part in split_into_batches(experiences):
            await tx.execute(delete(table).where(table.c.experience.in_(part)))

    async def store(self, tx: AsyncConnection) -> None:
        """Write the collected rows, except those of training steps, to the database."""
        await upsert_all(tx, tables.feedback, ("session", "partition", "log_offset"), self._feedback)
        await upsert_all(tx, tables.trained_revisions, ("lineage", "save", "experience", "revision"), self.trained)
        if self._items:
            await tx.execute(insert_new(tx, review_tables.items, ("name",)), self._items)
            await upsert_all(tx, review_tables.verdicts, ("item", "rater", "number"), self._verdicts)
        new_refusals = self.refusals - self._known_refusals
        if new_refusals:
            await tx.execute(
                insert(tables.refusals), [{"name": name, "read_day": self._day} for name in sorted(new_refusals)]
            )
        await self._store_rewards(tx)
        hours = [key._asdict() | asdict(hour) for key, hour in self._hours.items() if hour.rewards or hour.total]
        await upsert_all(tx, tables.hours, HourKey._fields, hours, added=("rewards", "total"))

    async def _store_rewards(self, tx: AsyncConnection) -> None:
        """Write the rewards that changed in this batch of records. Rows of rewards that already exist are deleted and
        inserted again, because PostgreSQL has no unique key for them.
        """
        table = tables.rewards
        key = tuple_(*(table.c[name] for name in RewardKey._fields))
        for part in split_into_batches(self._changed_rewards & self._stored_rewards):
            in_trajectories = table.c.trajectory.in_({revised.trajectory for revised in part})
            await tx.execute(delete(table).where(in_trajectories, key.in_(part)))
        for part in split_into_batches(sorted(self._changed_rewards)):  # an index takes ordered rows with fewer bytes
            rows = [{column.name: self._rewards[changed][column.name] for column in table.c} for changed in part]
            await tx.execute(insert(table), rows)


def _hour_key(key: RewardKey, row: dict[str, Any]) -> HourKey:
    return HourKey(row["tenant"], key.source, row["at_ms"] // tables.HOUR_MS, row["outcome"], bucket_of(row["value"]))


def bucket_of(value: float | None) -> int:
    """Return the histogram bucket of a value, in tenths: -11 (below -1) to 10 (1 and above), or `NO_VALUE` for None."""
    if value is None:
        return tables.NO_VALUE
    return -_BUCKETS - 1 if value < -1 else min(_BUCKETS, math.floor(value * _BUCKETS))
