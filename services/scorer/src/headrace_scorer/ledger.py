"""The ledger table, which stores every revision of every reward, edit and preference, and the matching of feedback to
it.

Functions run in their caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.tables import is_one_of, upsert
from headrace_schemas import Reward, Trajectory
from headrace_schemas.values.ids import owner_of
from headrace_schemas.values.text import printable
from headrace_scorer import feedback_matching, metrics, session_index, store
from headrace_scorer.feedback_entries import ANY_CHOICE, EntryKey, FeedbackEntry, entries_of, source_reward
from headrace_scorer.feedback_matching import (
    EVENTS_MAX,
    ClosedRuns,
    FeedbackPosition,
    FeedbackSet,
    PlacedFeedback,
    newest,
)
from headrace_scorer.reward_policy import SourceReward
from headrace_scorer.schema import ledger
from headrace_scorer.session_index import ClosedNeighbours
from headrace_scorer.settings import ScorerSettings

Row = Mapping[str, Any]
_KEY = [column.name for column in ledger.primary_key if column.name != "revision"]


class LedgerEntries:
    """The ledger's rows about one trajectory of one tenant, and new rows to be stored."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._latest: dict[EntryKey, Row] = {}
        self._from_feedback: dict[EntryKey, Row] = {}
        self.unsaved: list[Row] = []
        """New rows that `save` inserts into the table."""
        for row in sorted(rows, key=lambda row: int(row["revision"])):
            self._set(row)

    def add(self, row: Row) -> None:
        """Add a row to be stored. Its revision must be higher than those of earlier rows with the same key."""
        self._set(row)
        self.unsaved.append(row)

    def _set(self, row: Row) -> None:
        key = key_of(row)
        self._latest[key] = row
        if row["feedback_id"] is not None:
            self._from_feedback[key] = row

    @property
    def open_sources(self) -> set[str]:
        """Sources that have rewarded the trajectory under names that callers chose.

        Sources of Headrace's own services are left out.
        """
        sources = {key.source for key in self._latest if key.kind == "reward"}
        return {source for source in sources if owner_of(source) is None}

    @property
    def from_feedback(self) -> dict[EntryKey, Row]:
        """Newest ledger row of each reward, edit or preference that feedback gave, by its key.

        Rows from other origins, such as judges and reward functions, are left out.
        """
        return dict(self._from_feedback)

    def next_revision(self, key: EntryKey) -> int:
        """Return the number of the next revision of `key`: 0 for the first revision."""
        row = self._latest.get(key)
        return 0 if row is None else int(row["revision"]) + 1

    def current(self) -> list[SourceReward]:
        """Return the newest revision of each reward as the reward policy's input."""
        return [
            source_reward(key, row["outcome"], row["value"])
            for key, row in self._latest.items()
            if key.kind == "reward"
        ]

    def rewards(self) -> list[Row]:
        """Return the newest row of each reward. Unlike `current`, rows contain the values of criteria."""
        return [row for key, row in self._latest.items() if key.kind == "reward"]

    def reward(self, key: EntryKey) -> Row | None:
        """Return the newest row of `key`, or None if there is none."""
        return self._latest.get(key)

    def corrections(self) -> dict[EntryKey, str]:
        """Return the valid edits and preferences about the trajectory: an edit as its message in JSON, a preference as
        the side of the answer.
        """
        return {key: row["detail"] for key, row in self._latest.items() if row["outcome"] == "given"}


async def read(tx: AsyncConnection, tenants: Mapping[str, str]) -> dict[str, LedgerEntries]:
    """Read the newest ledger row of each key about several trajectories.

    For keys with rows from feedback, the newest row from feedback is read too. Earlier revisions are not read, so an
    entry that was revised a thousand times costs as much as any other.

    Args:
        tx: the transaction.
        tenants: tenant by trajectory id. Rows of other tenants are ignored.
    """
    later = ledger.alias()
    replaced = select(later.c.revision).where(
        *(later.c[name] == ledger.c[name] for name in _KEY),
        later.c.revision > ledger.c.revision,
        or_(ledger.c.feedback_id.is_(None), later.c.feedback_id.is_not(None)),
    )
    of_tenants = is_one_of(ledger.c.trajectory_id, ledger.c.tenant, tenants.items())
    query = select(ledger).where(of_tenants, ~replaced.exists())
    rows: dict[str, list[Row]] = {trajectory_id: [] for trajectory_id in tenants}
    for row in (await tx.execute(query)).mappings():
        rows[row["trajectory_id"]].append(dict(row))
    return {trajectory_id: LedgerEntries(of_trajectory) for trajectory_id, of_trajectory in rows.items()}


async def history(tx: AsyncConnection, trajectory_id: str) -> list[Row]:
    """Return every revision of every entry about a trajectory as rows, for the REST interface."""
    key = (ledger.c.kind, ledger.c.source, ledger.c.turn_id, ledger.c.choice, ledger.c.subject)
    order = (ledger.c.tenant, *key, ledger.c.revision)
    query = select(ledger).where(ledger.c.trajectory_id == trajectory_id).order_by(*order)
    return [dict(row) for row in (await tx.execute(query)).mappings()]


def add_rewards(now: datetime, rewards: Iterable[Reward], entries: LedgerEntries) -> None:
    """Add rewards that the scorer computed itself, such as those of reward functions, to `entries`."""
    for reward in rewards:
        entries.add(_row(reward, now))


def add_feedback_entries(
    now: datetime,
    trajectory: Trajectory,
    changes: Iterable[tuple[EntryKey, FeedbackEntry]],
    entries: LedgerEntries,
) -> list[Reward]:
    """Add a new revision to `entries` for each entry that feedback changes.

    Returns:
        The rewards among the new revisions.
    """
    rewards = []
    for key, entry in changes:
        row = _feedback_row(trajectory, key, entry, entries.next_revision(key), now)
        entries.add(row)
        if key.kind == "reward":
            rewards.append(_reward(trajectory, row, now))
    return rewards


async def save(tx: AsyncConnection, ledgers: Iterable[LedgerEntries]) -> None:
    """Insert the new rows of several trajectories into the table."""
    rows = []
    for entries in ledgers:
        rows += entries.unsaved
        entries.unsaved = []
    if rows:
        await tx.execute(insert(ledger), rows)
    for row in rows:
        _count(row)


async def insert_received(tx: AsyncConnection, now: datetime, reward: Reward) -> bool:
    """Insert a reward that was read from the bus.

    Returns:
        False if the ledger has this revision already, for example because the scorer published it itself.
    """
    row = _row(reward, now)
    key = {column.name: row.pop(column.name) for column in ledger.primary_key}
    fresh = await upsert(tx, ledger, key, row, update=False)
    if fresh:
        _count(key | row)
    return fresh


def key_of(row: Row) -> EntryKey:
    """Return the key of a ledger row."""
    return EntryKey(row["kind"], row["turn_id"], row["choice"], row["subject"], row["source"])


def _row(reward: Reward, now: datetime) -> dict[str, Any]:
    return {
        "trajectory_id": reward.trajectory_id,
        "tenant": reward.tenant,
        "kind": "reward",
        "turn_id": reward.turn_id or "",
        "choice": ANY_CHOICE if reward.choice is None else reward.choice,
        "subject": "",
        "source": reward.source,
        "revision": reward.revision,
        "outcome": reward.outcome,
        "value": reward.value,
        "criteria": json.dumps(reward.criteria) if reward.criteria else None,
        "reason": reward.reason,
        "judged_by": reward.judged_by,
        "detail": None,
        "feedback_id": None,
        "time_ms": epoch_ms(reward.time),
        "arrived_ms": epoch_ms(now),
    }


def _feedback_row(
    trajectory: Trajectory, key: EntryKey, entry: FeedbackEntry, revision: int, now: datetime
) -> dict[str, Any]:
    return {
        "trajectory_id": trajectory.trajectory_id,
        "tenant": trajectory.tenant,
        **key._asdict(),
        "revision": revision,
        "outcome": entry.outcome,
        "value": entry.value,
        "criteria": None,
        "reason": entry.reason,
        "judged_by": None,
        "detail": entry.detail,
        "feedback_id": entry.origin,
        "time_ms": epoch_ms(now),
        "arrived_ms": epoch_ms(now),
    }


def _reward(trajectory: Trajectory, row: Row, now: datetime) -> Reward:
    return Reward(
        time=now,
        trajectory_id=trajectory.trajectory_id,
        session_key=trajectory.session_key,
        tenant=trajectory.tenant,
        turn_id=row["turn_id"] or None,
        choice=None if row["choice"] == ANY_CHOICE else row["choice"],
        source=row["source"],
        revision=row["revision"],
        outcome=row["outcome"],
        value=row["value"],
        reason=row["reason"],
    )


def _count(row: Row) -> None:
    if row["kind"] != "reward":
        metrics.CORRECTIONS.labels(row["kind"], row["outcome"]).inc()
        return
    source: str = row["source"]
    kind = source.partition(":")[0] if source.startswith(("function:", "judge:", "feedback:")) else "other"
    metrics.REWARDS.labels("feedback" if source == "feedback" else kind, row["outcome"]).inc()


CORRECTIONS_MAX = 128
"""Largest number of edits of a trajectory that count, and of preferences. The newest count."""
SOURCES_MAX = 64
"""Largest number of sources per trajectory besides reward functions, judges and the reward model. Rewards of further
sources are dead-lettered; sources of feedback are left out."""

log = get_logger(__name__)
_PLACED_BY_TIME_MAX = 4096
"""Largest number of feedback events of a session that are placed by their time and read for one trajectory."""
_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class MatchedFeedback:
    """Feedback about one trajectory, and the ids of other trajectories from which it takes over feedback."""

    feedback_set: FeedbackSet
    displaced: Sequence[str]


async def feedback_for(
    tx: AsyncConnection, trajectories: Sequence[Trajectory], *, is_new: bool = False
) -> dict[str, MatchedFeedback]:
    """Match stored trajectories with the feedback about them, and return the feedback by trajectory id.

    For each trajectory only the newest feedback counts (`feedback_matching.newest`); only its content is loaded.

    Args:
        tx: the transaction.
        trajectories: the stored trajectories.
        is_new: whether the trajectories are new, so that others may lose feedback to them.
    """
    listings = await session_index.listing_positions(tx, trajectories)
    about_sessions = await session_index.general_positions(tx, trajectories, _PLACED_BY_TIME_MAX, is_new=is_new)
    counted: dict[str, tuple[list[FeedbackPosition], list[FeedbackPosition]]] = {}
    for name, (peers, positions) in about_sessions.items():
        counted[name] = _newest_about(name, peers, listings[name], positions)
    records = await store.load_feedback(tx, (item.name for pair in counted.values() for part in pair for item in part))
    matched: dict[str, MatchedFeedback] = {}
    tasks: dict[str, store.Task] = {}
    for trajectory in trajectories:
        name = trajectory.trajectory_id
        peers, positions = about_sessions[name]
        listing, general = ([records[item.name] for item in part if item.name in records] for part in counted[name])
        feedback_set = feedback_matching.feedback_for(name, peers, listing, general)
        losing: Sequence[str] = ()
        if is_new:
            by_offset = [item for item in positions if item.turns_until is not None]
            by_time = [record for record in general if record.turns_until is None]
            losing = feedback_matching.trajectories_losing_feedback(name, peers, [*by_offset, *by_time])
        matched[name] = MatchedFeedback(feedback_set, losing)
        task_id = feedback_set.resolve_id("task_id", trajectory.task_id)
        if task_id is not None:
            tasks[name] = trajectory.tenant, task_id
    about_tasks = {name: newest(part) for name, part in (await session_index.feedback_about_tasks(tx, tasks)).items()}
    records = await store.load_feedback(tx, (item.name for part in about_tasks.values() for item in part))
    for name, part in about_tasks.items():
        of_task = [records[item.name] for item in part if item.name in records]
        feedback_set = feedback_matching.with_task(matched[name].feedback_set, of_task)
        matched[name] = replace(matched[name], feedback_set=feedback_set)
    return matched


def _newest_about(
    trajectory_id: str,
    peers: ClosedRuns,
    listing: Sequence[FeedbackPosition],
    general: Sequence[FeedbackPosition],
) -> tuple[list[FeedbackPosition], list[FeedbackPosition]]:
    """Return the newest feedback that lists turns of a trajectory, and the newest about its session that applies to it.

    Feedback without the offsets of a gateway is matched by its time, which only its content has. Therefore up to
    `_PLACED_BY_TIME_MAX` positions of such feedback are returned.
    """
    by_time = [item for item in general if item.turns_until is None]
    placed = [
        item
        for item in general
        if item.turns_until is not None and trajectory_id in feedback_matching.target_trajectories(item, peers)
    ]
    counted = newest(listing), newest(placed), newest(by_time, _PLACED_BY_TIME_MAX)
    left_out = len(listing) + len(placed) + len(by_time) - sum(map(len, counted))
    if left_out and not left_out & (left_out - 1):  # at powers of two: each feedback of a flood leaves out one more
        log.warning("feedback_left_out", trajectory=trajectory_id, count=left_out, most=EVENTS_MAX)
    return counted[0], [*counted[1], *counted[2]]


async def targets_of(tx: AsyncConnection, placed: PlacedFeedback) -> Sequence[str]:
    """Return the ids of the stored trajectories that a new feedback event is about."""
    feedback = placed.event
    if feedback.msg_ids:
        return await store.trajectories_with(tx, feedback.msg_ids, feedback.tenant)
    peers = await ClosedNeighbours(tx, (feedback.session_key, feedback.tenant)).peers_of(placed)
    return sorted(feedback_matching.target_trajectories(placed, peers))


def revise_entries(
    now: datetime,
    trajectory: Trajectory,
    feedback_set: FeedbackSet,
    entries: LedgerEntries,
    settings: ScorerSettings,
) -> list[Reward]:
    """Add new revisions of the ledger entries that the feedback about a trajectory changes.

    Returns:
        New revisions of rewards, to be published. Edits and preferences are only in the ledger.
    """
    answers = store.branch_answers(trajectory)
    expected = entries_of(feedback_set, answers, settings.labels, CORRECTIONS_MAX)
    present = entries.from_feedback
    changes: list[tuple[EntryKey, FeedbackEntry]] = [
        (key, FeedbackEntry("withdrawn", row["feedback_id"]))
        for key, row in present.items()
        if key not in expected and row["outcome"] != "withdrawn"  # the feedback is now about a later trajectory
    ]
    sources = entries.open_sources
    left_out: set[str] = set()
    for key, entry in expected.items():
        if key.kind == "reward" and len(sources | {key.source}) > SOURCES_MAX:
            left_out.add(key.source)
            continue
        if key not in present or _differs(present[key], entry):
            changes.append((key, entry))
            sources |= {key.source} if key.kind == "reward" else set()
    if left_out:
        names = [printable(name, 64) for name in sorted(left_out)[:_NAMED_MAX]]
        log.warning("sources_left_out", trajectory=trajectory.trajectory_id, count=len(left_out), sources=names)
    return add_feedback_entries(now, trajectory, changes, entries)


def _differs(row: Row, entry: FeedbackEntry) -> bool:
    return (row["feedback_id"], row["outcome"], row["value"]) != (entry.origin, entry.outcome, entry.value)
