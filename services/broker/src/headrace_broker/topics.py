"""Topics, committed offsets and stored groups: `TopicStore` and `CommittedOffsets` write them, and `TopicCatalog` is
the committed state of the topics in memory.

The writing classes belong to the writer's thread; the module `reads` reads their tables. `TopicCatalog` belongs to the
event loop, and also knows which requests wait for new records.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headrace_broker.errors import Code, Rejected
from headrace_broker.log import Log, PartitionMoved
from headrace_broker.protocol.groups import CommitTopic
from headrace_broker.store_format import PARTITION_ID_MAX
from headrace_broker.topic_config import TopicConfig

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class TopicCreated(NamedTuple):
    """A topic was created. `partition_ids` are in the order of the partition numbers."""

    name: str
    config: TopicConfig
    partition_ids: tuple[int, ...]


class TopicAltered(NamedTuple):
    """The settings of a topic were changed."""

    name: str
    config: TopicConfig


class TopicGrown(NamedTuple):
    """Partitions with the ids `partition_ids` were added to a topic, in this order."""

    name: str
    partition_ids: tuple[int, ...]


class TopicDeleted(NamedTuple):
    """A topic was deleted."""

    name: str


Event = TopicCreated | TopicAltered | TopicGrown | TopicDeleted


class TopicStore:
    """Write operations on the table `topics`. `flush` returns the changes that a commit contains."""

    def __init__(self, db: sqlite3.Connection, log: Log, partitions_max: int) -> None:
        self._db = db
        self._log = log
        self._partitions_max = partitions_max
        self._events: list[Event] = []

    def reload(self) -> None:
        """Drop the recorded changes, because their transaction was rolled back."""
        self._events.clear()

    def flush(self) -> list[Event]:
        """Return the changes of the transaction, and begin a new list."""
        events, self._events = self._events, []
        return events

    def all(self) -> list[TopicCreated]:
        """Return all stored topics as `TopicCreated` changes, with which the catalog is filled at the start."""
        ids: dict[str, list[tuple[int, int]]] = {}
        for partition in self._log.partitions():
            ids.setdefault(partition.topic, []).append((partition.number, partition.id))
        rows = self._db.execute("SELECT name, config FROM topics ORDER BY name").fetchall()
        return [
            TopicCreated(name, TopicConfig.unpacked(config), tuple(key for _, key in sorted(ids[name])))
            for name, config in rows
        ]

    def create(self, name: str, partitions: int, config: TopicConfig, *, validate_only: bool) -> None:
        """Create a topic.

        Raises `Rejected` for an invalid name (17), an existing topic (36), or partitions (37, 44).
        """
        check_name(name)
        if partitions < 1:
            raise Rejected(Code.INVALID_PARTITIONS, f"{partitions} partitions: must be at least 1")
        if self._db.execute("SELECT 1 FROM topics WHERE name = ?", (name,)).fetchone():
            raise Rejected(Code.TOPIC_ALREADY_EXISTS, f"topic {name} already exists")
        self._check_limit(partitions)
        if validate_only:
            return
        self._db.execute("INSERT INTO topics VALUES (?, ?)", (name, config.packed()))
        ids = tuple(self._log.add(name, number).id for number in range(partitions))
        self._events.append(TopicCreated(name, config, ids))

    def alter(self, name: str, change: Callable[[TopicConfig], TopicConfig], *, validate_only: bool) -> None:
        """Replace the settings of a topic by the result of `change`. Raises `Rejected` with error code 3 or 40."""
        row = self._db.execute("SELECT config FROM topics WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name} does not exist")
        config = change(TopicConfig.unpacked(row[0]))
        if not validate_only:
            self._db.execute("UPDATE topics SET config = ? WHERE name = ?", (config.packed(), name))
            self._events.append(TopicAltered(name, config))

    def grow(self, name: str, partitions: int, *, validate_only: bool) -> None:
        """Add partitions to a topic, up to the total number `partitions`.

        Raises `Rejected` with error code 3, 37 or 44.
        """
        present = self._db.execute("SELECT count(*) FROM partitions WHERE topic = ?", (name,)).fetchone()[0]
        if not present:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name} does not exist")
        if partitions <= present:
            raise Rejected(
                Code.INVALID_PARTITIONS, f"topic {name} has {present} partitions; their number can only be increased"
            )
        self._check_limit(partitions - present)
        if not validate_only:
            ids = tuple(self._log.add(name, number).id for number in range(present, partitions))
            self._events.append(TopicGrown(name, ids))

    def delete(self, name: str) -> None:
        """Delete a topic and its offsets in all groups. Maintenance deletes its records.

        Raises:
            Rejected: the topic does not exist (3).
        """
        if not self._db.execute("DELETE FROM topics WHERE name = ?", (name,)).rowcount:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name} does not exist")
        for (partition_id,) in self._db.execute("SELECT id FROM partitions WHERE topic = ?", (name,)).fetchall():
            self._log.drop(partition_id)
        self._db.execute("DELETE FROM offsets WHERE topic = ?", (name,))
        self._db.execute("DELETE FROM pending_offsets WHERE topic = ?", (name,))
        self._events.append(TopicDeleted(name))

    def _check_limit(self, partitions: int) -> None:
        total, newest = self._db.execute("SELECT count(*), coalesce(max(id), 0) FROM partitions").fetchone()
        if total + partitions > self._partitions_max or newest + partitions > PARTITION_ID_MAX:
            limit = f"{self._partitions_max} partitions"
            raise Rejected(Code.POLICY_VIOLATION, f"{partitions} more partitions than {total} exceed {limit}")


def check_name(name: str) -> None:
    """Check that Kafka accepts a topic name. Raises `Rejected` with error code 17."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise Rejected(
            Code.INVALID_TOPIC, f"topic name {name[:60]!r}: must have at most 249 letters, digits, `.`, `_` and `-`"
        )


class CommittedOffsets:
    """Write operations on the tables `offsets`, `pending_offsets` and `groups`. No state is cached in memory."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def commit(self, group_id: str, topics: tuple[CommitTopic, ...], now_ms: int) -> None:
        """Store committed offsets of a group, and the time of its last use. The partitions must exist."""
        self._db.executemany(
            "INSERT OR REPLACE INTO offsets VALUES (?, ?, ?, ?, ?)",
            [(group_id, topic.name, p.partition, p.offset, p.metadata) for topic in topics for p in topic.partitions],
        )
        self._use(group_id, now_ms)

    def add_pending(self, transaction_id: str, group_id: str, topics: tuple[CommitTopic, ...]) -> None:
        """Store offsets that will be committed if the transaction commits."""
        self._db.executemany(
            "INSERT OR REPLACE INTO pending_offsets VALUES (?, ?, ?, ?, ?, ?)",
            [
                (transaction_id, group_id, topic.name, p.partition, p.offset, p.metadata)
                for topic in topics
                for p in topic.partitions
            ],
        )

    def resolve_pending(self, transaction_id: str, *, commit: bool, now_ms: int) -> None:
        """Commit or drop the pending offsets of a transaction that has ended."""
        if commit:
            query = "SELECT DISTINCT group_id FROM pending_offsets WHERE transaction_id = ?"
            for (group_id,) in self._db.execute(query, (transaction_id,)).fetchall():
                self._use(group_id, now_ms)
            self._db.execute(
                "INSERT OR REPLACE INTO offsets SELECT group_id, topic, partition, committed, metadata"
                " FROM pending_offsets WHERE transaction_id = ?",
                (transaction_id,),
            )
        self._db.execute("DELETE FROM pending_offsets WHERE transaction_id = ?", (transaction_id,))

    def save_group(self, group_id: str, state: bytes, now_ms: int) -> None:
        """Store the encoded state of a group."""
        self._db.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?)", (group_id, state, now_ms))

    def delete_group(self, group_id: str) -> None:
        """Delete a group with its offsets."""
        self._db.execute("DELETE FROM groups WHERE id = ?", (group_id,))
        self._db.execute("DELETE FROM offsets WHERE group_id = ?", (group_id,))
        self._db.execute("DELETE FROM pending_offsets WHERE group_id = ?", (group_id,))

    def _use(self, group_id: str, now_ms: int) -> None:
        self._db.execute(
            "INSERT INTO groups VALUES (?, x'', ?) ON CONFLICT DO UPDATE SET used_ms = excluded.used_ms",
            (group_id, now_ms),
        )


Change = PartitionMoved | Event


@dataclass(eq=False, slots=True)
class PartitionView:
    """Committed state of a partition's log. `stable` is the last stable offset.

    Each change sets all events in `readers`, on which requests wait for new records.
    """

    id: int
    topic: str
    number: int
    start: int = 0
    end: int = 0
    stable: int = 0
    bytes: int = 0
    deleted: bool = False
    readers: set[asyncio.Event] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class TopicState:
    """An existing topic, with its partitions by number."""

    name: str
    config: TopicConfig
    partitions: tuple[PartitionView, ...]


class TopicCatalog:
    """Committed state of all topics in memory.

    Only `apply` changes it. The writer calls `apply` in the event loop after each commit.
    """

    def __init__(self) -> None:
        self.topics: dict[str, TopicState] = {}
        self._views: dict[int, PartitionView] = {}

    def view(self, topic: str, number: int) -> PartitionView | None:
        """Return the state of a partition, or None if it does not exist."""
        state = self.topics.get(topic)
        return state.partitions[number] if state and 0 <= number < len(state.partitions) else None

    def views(self) -> Iterable[PartitionView]:
        """Return the states of all partitions of all topics."""
        return self._views.values()

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply the changes of a commit, in order."""
        for change in changes:
            match change:
                case TopicCreated():
                    self._add(change)
                case TopicAltered():
                    self.topics[change.name] = replace(self.topics[change.name], config=change.config)
                case TopicGrown():
                    self._grow(change)
                case TopicDeleted():
                    self._remove(change)
                case PartitionMoved():
                    self._move(change)

    def _add(self, created: TopicCreated) -> None:
        views = tuple(PartitionView(key, created.name, number) for number, key in enumerate(created.partition_ids))
        self._views.update({view.id: view for view in views})
        self.topics[created.name] = TopicState(created.name, created.config, views)

    def _grow(self, grown: TopicGrown) -> None:
        topic = self.topics[grown.name]
        first = len(topic.partitions)
        views = tuple(PartitionView(key, topic.name, first + number) for number, key in enumerate(grown.partition_ids))
        self._views.update({view.id: view for view in views})
        self.topics[topic.name] = replace(topic, partitions=topic.partitions + views)

    def _remove(self, deleted: TopicDeleted) -> None:
        for view in self.topics.pop(deleted.name).partitions:
            del self._views[view.id]
            view.deleted = True
            _wake(view)

    def _move(self, moved: PartitionMoved) -> None:
        view = self._views.get(moved.id)
        if view is not None:
            view.start, view.end, view.stable, view.bytes = moved.start, moved.end, moved.stable, moved.bytes
            _wake(view)


def _wake(view: PartitionView) -> None:
    for reader in view.readers:
        reader.set()
