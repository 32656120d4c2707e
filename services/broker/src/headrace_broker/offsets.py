"""Committed offsets and saved groups, as they are written. Runs on the writer's thread; reads go through `reads`."""

from __future__ import annotations

import sqlite3

from headrace_broker.protocol.offsets import CommitTopic


class CommittedOffsets:
    """The tables `offsets`, `pending_offsets` and `groups`. Keeps nothing in memory."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def commit(self, group_id: str, topics: tuple[CommitTopic, ...], now_ms: int) -> None:
        """Set the group's offsets and note that it is in use. The caller checked that the partitions exist."""
        self._db.executemany(
            "INSERT OR REPLACE INTO offsets VALUES (?, ?, ?, ?, ?)",
            [(group_id, topic.name, p.partition, p.offset, p.metadata) for topic in topics for p in topic.partitions],
        )
        self._use(group_id, now_ms)

    def hold(self, transaction_id: str, group_id: str, topics: tuple[CommitTopic, ...]) -> None:
        """Keep offsets until the transaction ends."""
        self._db.executemany(
            "INSERT OR REPLACE INTO pending_offsets VALUES (?, ?, ?, ?, ?, ?)",
            [
                (transaction_id, group_id, topic.name, p.partition, p.offset, p.metadata)
                for topic in topics
                for p in topic.partitions
            ],
        )

    def release(self, transaction_id: str, *, commit: bool, now_ms: int) -> None:
        """The transaction ended: its offsets become the groups', or are dropped."""
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
        self._db.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?)", (group_id, state, now_ms))

    def delete_group(self, group_id: str) -> None:
        self._db.execute("DELETE FROM groups WHERE id = ?", (group_id,))
        self._db.execute("DELETE FROM offsets WHERE group_id = ?", (group_id,))
        self._db.execute("DELETE FROM pending_offsets WHERE group_id = ?", (group_id,))

    def _use(self, group_id: str, now_ms: int) -> None:
        self._db.execute(
            "INSERT INTO groups VALUES (?, x'', ?) ON CONFLICT DO UPDATE SET used_ms = excluded.used_ms",
            (group_id, now_ms),
        )
