"""Topics as they are written: created and deleted on the writer's thread."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from typing import NamedTuple

from headrace_broker.errors import Code, Rejected
from headrace_broker.log import Log
from headrace_broker.store_format import PARTITION_ID_MAX
from headrace_broker.topic_config import TopicConfig

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class Created(NamedTuple):
    """A new topic, for the event loop: partition ids by partition number."""

    name: str
    config: TopicConfig
    partition_ids: tuple[int, ...]


class Altered(NamedTuple):
    """A topic whose settings are other ones, for the event loop."""

    name: str
    config: TopicConfig


class Grown(NamedTuple):
    """A topic that got more partitions, for the event loop: the ids of the new ones, in order."""

    name: str
    partition_ids: tuple[int, ...]


class Deleted(NamedTuple):
    """A topic that is gone, for the event loop."""

    name: str


Event = Created | Altered | Grown | Deleted


class TopicStore:
    """The table `topics`. `flush` tells of what was created and deleted."""

    def __init__(self, db: sqlite3.Connection, log: Log, partitions_max: int) -> None:
        self._db = db
        self._log = log
        self._partitions_max = partitions_max
        self._events: list[Event] = []

    def reload(self) -> None:
        self._events.clear()

    def flush(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def all(self) -> list[Created]:
        """Every topic that is stored."""
        ids: dict[str, list[tuple[int, int]]] = {}
        for partition in self._log.partitions():
            ids.setdefault(partition.topic, []).append((partition.number, partition.id))
        rows = self._db.execute("SELECT name, config FROM topics ORDER BY name").fetchall()
        return [
            Created(name, TopicConfig.unpacked(config), tuple(key for _, key in sorted(ids[name])))
            for name, config in rows
        ]

    def create(self, name: str, partitions: int, config: TopicConfig, *, validate_only: bool) -> None:
        """Raises `Rejected`: a bad name (17), it exists (36), too many partitions (37, 44)."""
        check_name(name)
        if partitions < 1:
            raise Rejected(Code.INVALID_PARTITIONS, f"{partitions} partitions; at least one")
        if self._db.execute("SELECT 1 FROM topics WHERE name = ?", (name,)).fetchone():
            raise Rejected(Code.TOPIC_ALREADY_EXISTS, f"topic {name} exists already")
        self._check_room(partitions)
        if validate_only:
            return
        self._db.execute("INSERT INTO topics VALUES (?, ?)", (name, config.packed()))
        ids = tuple(self._log.add(name, number).id for number in range(partitions))
        self._events.append(Created(name, config, ids))

    def alter(self, name: str, change: Callable[[TopicConfig], TopicConfig], *, validate_only: bool) -> None:
        """Give the topic the settings that `change` makes of its present ones. Raises `Rejected` (3, 40)."""
        row = self._db.execute("SELECT config FROM topics WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        config = change(TopicConfig.unpacked(row[0]))
        if not validate_only:
            self._db.execute("UPDATE topics SET config = ? WHERE name = ?", (config.packed(), name))
            self._events.append(Altered(name, config))

    def grow(self, name: str, partitions: int, *, validate_only: bool) -> None:
        """Add partitions until there are so many. Raises `Rejected` (3, 37, 44)."""
        present = self._db.execute("SELECT count(*) FROM partitions WHERE topic = ?", (name,)).fetchone()[0]
        if not present:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        if partitions <= present:
            raise Rejected(Code.INVALID_PARTITIONS, f"{name} has {present} partitions; more can be asked for, not less")
        self._check_room(partitions - present)
        if not validate_only:
            ids = tuple(self._log.add(name, number).id for number in range(present, partitions))
            self._events.append(Grown(name, ids))

    def delete(self, name: str) -> None:
        """The topic, its offsets in all groups, and later its records. Raises `Rejected` (3)."""
        if not self._db.execute("DELETE FROM topics WHERE name = ?", (name,)).rowcount:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        for (partition_id,) in self._db.execute("SELECT id FROM partitions WHERE topic = ?", (name,)).fetchall():
            self._log.drop(partition_id)
        self._db.execute("DELETE FROM offsets WHERE topic = ?", (name,))
        self._db.execute("DELETE FROM pending_offsets WHERE topic = ?", (name,))
        self._events.append(Deleted(name))

    def _check_room(self, partitions: int) -> None:
        total, newest = self._db.execute("SELECT count(*), coalesce(max(id), 0) FROM partitions").fetchone()
        if total + partitions > self._partitions_max or newest + partitions > PARTITION_ID_MAX:
            limit = f"broker.partitions_max = {self._partitions_max}"
            raise Rejected(Code.POLICY_VIOLATION, f"{partitions} more partitions than {total} pass {limit}")


def check_name(name: str) -> None:
    """Raises `Rejected` (17) for a name that Kafka would not take."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise Rejected(Code.INVALID_TOPIC, f"topic name {name[:60]!r}: letters, digits, . _ - and at most 249 of them")
