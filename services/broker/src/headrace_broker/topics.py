"""Topics as they are written: created and deleted on the writer's thread."""

from __future__ import annotations

import json
import re
import sqlite3
from typing import NamedTuple

from headrace_broker.errors import Code, Rejected
from headrace_broker.log import Log
from headrace_broker.store import PARTITION_ID_MAX
from headrace_broker.topic_config import TopicConfig

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class Created(NamedTuple):
    """A new topic, for the event loop: partition ids by partition number."""

    name: str
    config: TopicConfig
    partition_ids: tuple[int, ...]


class Deleted(NamedTuple):
    """A topic that is gone, for the event loop."""

    name: str


class Topics:
    """The table `topics`. `flush` tells of what was created and deleted."""

    def __init__(self, db: sqlite3.Connection, log: Log, partitions_max: int) -> None:
        self._db = db
        self._log = log
        self._partitions_max = partitions_max
        self._events: list[Created | Deleted] = []

    def reload(self) -> None:
        self._events.clear()

    def flush(self) -> list[Created | Deleted]:
        events, self._events = self._events, []
        return events

    def all(self) -> list[Created]:
        """Every topic that is stored."""
        ids: dict[str, list[tuple[int, int]]] = {}
        for partition in self._log.partitions():
            ids.setdefault(partition.topic, []).append((partition.number, partition.id))
        rows = self._db.execute("SELECT name, config FROM topics ORDER BY name").fetchall()
        return [
            Created(name, TopicConfig(*json.loads(config)), tuple(key for _, key in sorted(ids[name])))
            for name, config in rows
        ]

    def create(self, name: str, partitions: int, config: TopicConfig, *, validate_only: bool) -> None:
        """Raises `Rejected`: a bad name (17), it exists (36), too many partitions (37, 44)."""
        check_name(name)
        if partitions < 1:
            raise Rejected(Code.INVALID_PARTITIONS, f"{partitions} partitions; at least one")
        if self._db.execute("SELECT 1 FROM topics WHERE name = ?", (name,)).fetchone():
            raise Rejected(Code.TOPIC_ALREADY_EXISTS, f"topic {name} exists already")
        total, newest = self._db.execute("SELECT count(*), coalesce(max(id), 0) FROM partitions").fetchone()
        if total + partitions > self._partitions_max or newest + partitions > PARTITION_ID_MAX:
            limit = f"broker.partitions_max = {self._partitions_max}"
            raise Rejected(Code.POLICY_VIOLATION, f"{partitions} more partitions than {total} pass {limit}")
        if validate_only:
            return
        self._db.execute("INSERT INTO topics VALUES (?, ?)", (name, json.dumps(config)))
        ids = tuple(self._log.add(name, number).id for number in range(partitions))
        self._events.append(Created(name, config, ids))

    def delete(self, name: str) -> None:
        """The topic, its offsets in all groups, and later its records. Raises `Rejected` (3)."""
        if not self._db.execute("DELETE FROM topics WHERE name = ?", (name,)).rowcount:
            raise Rejected(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        for (partition_id,) in self._db.execute("SELECT id FROM partitions WHERE topic = ?", (name,)).fetchall():
            self._log.drop(partition_id)
        self._db.execute("DELETE FROM offsets WHERE topic = ?", (name,))
        self._db.execute("DELETE FROM pending_offsets WHERE topic = ?", (name,))
        self._events.append(Deleted(name))


def check_name(name: str) -> None:
    """Raises `Rejected` (17) for a name that Kafka would not take."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise Rejected(Code.INVALID_TOPIC, f"topic name {name[:60]!r}: letters, digits, . _ - and at most 249 of them")
