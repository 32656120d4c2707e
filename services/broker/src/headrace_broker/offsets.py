"""Writing side of committed offsets and saved groups, in the writer's thread. The module `reads` reads them."""

from __future__ import annotations

import sqlite3

from headrace_broker.protocol.offsets import CommitTopic


class CommittedOffsets:
    """The tables `offsets`, `pending_offsets` and `groups`, without a cache in memory."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def commit(self, group_id: str, topics: tuple[CommitTopic, ...], now_ms: int) -> None:
        """Set offsets of a group and mark it as used. The partitions must exist."""
        self._db.executemany(
            "INSERT OR REPLACE INTO offsets VALUES (?, ?, ?, ?, ?)",
            [(group_id, topic.name, p.partition, p.offset, p.metadata) for topic in topics for p in topic.partitions],
        )
        self._use(group_id, now_ms)

    def hold(self, transaction_id: str, group_id: str, topics: tuple[CommitTopic, ...]) -> None:
        """Store offsets that take effect when the transaction commits."""
        self._db.executemany(
            "INSERT OR REPLACE INTO pending_offsets VALUES (?, ?, ?, ?, ?, ?)",
            [
                (transaction_id, group_id, topic.name, p.partition, p.offset, p.metadata)
                for topic in topics
                for p in topic.partitions
            ],
        )

    def release(self, transaction_id: str, *, commit: bool, now_ms: int) -> None:
        """Apply or drop the offsets of a transaction that has ended."""
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
        """Store the state of a group."""
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
