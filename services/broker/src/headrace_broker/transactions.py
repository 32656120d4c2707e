"""Transactions. One file and one writer make them short: a transaction ends in the SQLite transaction that ends it.

There is no prepared state to recover: after a crash a transaction is open or over. Runs on the writer's thread.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace_broker.errors import Code, Rejected
from headrace_broker.log import Log
from headrace_broker.offsets import CommittedOffsets
from headrace_broker.protocol.offsets import CommitTopic

_EPOCH_MAX = 32_767


class Owner(NamedTuple):
    """A producer that says it has the transactional id."""

    producer_id: int
    epoch: int


@dataclass(slots=True)
class Transaction:
    """One transactional id. `started_ms` is None while nothing is open.

    `bumped_from` is the epoch that its owner gave up for the present one: it may ask again when it missed the answer.
    """

    id: str
    producer_id: int
    epoch: int
    timeout_ms: int
    started_ms: int | None
    seen_ms: int
    partitions: set[int]
    bumped_from: int | None = None


class Transactions:
    """All transactional ids. Methods take the producer's id and epoch, which must be the newest."""

    def __init__(self, db: sqlite3.Connection, log: Log, offsets: CommittedOffsets) -> None:
        self._db = db
        self._log = log
        self._offsets = offsets
        self._known: dict[str, Transaction] = {}
        self._changed: set[str] = set()
        self.reload()

    def reload(self) -> None:
        rows = self._db.execute(
            "SELECT id, producer_id, epoch, timeout_ms, started_ms, seen_ms, partitions, bumped_from FROM transactions"
        )
        self._known = {
            name: Transaction(name, producer_id, epoch, timeout_ms, started_ms, seen_ms, set(json.loads(parts)), bumped)
            for name, producer_id, epoch, timeout_ms, started_ms, seen_ms, parts, bumped in rows
        }
        self._changed.clear()

    def flush(self) -> tuple[()]:
        self._db.executemany(
            "INSERT OR REPLACE INTO transactions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    t.id,
                    t.producer_id,
                    t.epoch,
                    t.timeout_ms,
                    t.started_ms,
                    t.seen_ms,
                    json.dumps(sorted(t.partitions)),
                    t.bumped_from,
                )
                for name in self._changed
                if (t := self._known.get(name))
            ],
        )
        self._changed.clear()
        return ()

    def new_producer_id(self) -> int:
        row = self._db.execute(
            "UPDATE meta SET value = value + 1 WHERE name = 'next_producer_id' RETURNING value - 1"
        ).fetchone()
        return int(row[0])

    def all(self) -> list[Transaction]:
        """Every transactional id that is known, as it is now."""
        return [replace(found, partitions=set(found.partitions)) for found in self._known.values()]

    def begin_session(self, name: str, timeout_ms: int, now_ms: int, owner: Owner | None = None) -> tuple[int, int]:
        """A producer took `name` over: abort what its predecessor left open, fence it, return producer id and epoch.

        An `owner` asks for its next epoch, after an error of its own. Raises `Rejected` (90) when it no longer is one.
        """
        found = self._known.get(name)
        if found is None:
            found = Transaction(name, self.new_producer_id(), 0, timeout_ms, None, now_ms, set())
            self._known[name] = found
        elif owner is None or owner == (found.producer_id, found.epoch):
            self._fence(found, now_ms)
            found.timeout_ms = timeout_ms
            found.bumped_from = owner.epoch if owner else None
        elif owner != (found.producer_id, found.bumped_from) or found.started_ms is not None:
            raise Rejected(Code.PRODUCER_FENCED, f"epoch {owner.epoch} of {name}, now {found.epoch}")
        self._touch(found, now_ms)
        return found.producer_id, found.epoch

    def add_partitions(self, name: str, producer_id: int, epoch: int, partition_ids: set[int], now_ms: int) -> None:
        """Raises `Rejected` (47, 49)."""
        found = self._checked(name, producer_id, epoch)
        found.partitions |= partition_ids
        self._open(found, now_ms)

    def add_group(self, name: str, producer_id: int, epoch: int, now_ms: int) -> None:
        """Raises `Rejected` (47, 49)."""
        self._open(self._checked(name, producer_id, epoch), now_ms)

    def check_append(self, name: str | None, partition_id: int, producer_id: int, epoch: int) -> None:
        """Raises `Rejected` unless the partition was added to the producer's open transaction."""
        if name is None:
            raise Rejected(Code.INVALID_REQUEST, "a transactional batch in a request without transactional id")
        found = self._checked(name, producer_id, epoch)
        if found.started_ms is None or partition_id not in found.partitions:
            raise Rejected(Code.INVALID_TXN_STATE, "the partition is not part of an open transaction")

    def commit_offsets(
        self, name: str, producer_id: int, epoch: int, group_id: str, topics: tuple[CommitTopic, ...]
    ) -> None:
        """Keep offsets that become the group's when the transaction commits. Raises `Rejected` (47, 48, 49)."""
        found = self._checked(name, producer_id, epoch)
        if found.started_ms is None:
            raise Rejected(Code.INVALID_TXN_STATE, "no transaction is open")
        self._offsets.hold(name, group_id, topics)

    def end(self, name: str, producer_id: int, epoch: int, *, commit: bool, now_ms: int) -> None:
        """Raises `Rejected` (47, 48, 49)."""
        found = self._checked(name, producer_id, epoch)
        if found.started_ms is None:
            raise Rejected(Code.INVALID_TXN_STATE, "no transaction is open")
        self._finish(found, commit=commit, now_ms=now_ms)

    def expire(self, now_ms: int, forget_before_ms: int) -> None:
        """Abort and fence what is open longer than its timeout; forget ids that were not seen for long."""
        for found in list(self._known.values()):
            if found.started_ms is not None and now_ms - found.started_ms > found.timeout_ms:
                self._fence(found, now_ms)
            elif found.started_ms is None and found.seen_ms < forget_before_ms:
                del self._known[found.id]
                self._db.execute("DELETE FROM transactions WHERE id = ?", (found.id,))

    def _checked(self, name: str, producer_id: int, epoch: int) -> Transaction:
        found = self._known.get(name)
        if found is None or found.producer_id != producer_id:
            raise Rejected(Code.INVALID_PRODUCER_ID_MAPPING, f"producer {producer_id} does not own {name}")
        if found.epoch != epoch:
            raise Rejected(Code.INVALID_PRODUCER_EPOCH, f"epoch {epoch}, now {found.epoch}")
        return found

    def _fence(self, found: Transaction, now_ms: int) -> None:
        """Abort the open transaction, and fence producers with the old epoch."""
        if found.started_ms is not None:
            self._finish(found, commit=False, now_ms=now_ms)
        if found.epoch < _EPOCH_MAX:
            found.epoch += 1
        else:
            found.producer_id, found.epoch = self.new_producer_id(), 0
        found.bumped_from = None
        self._changed.add(found.id)

    def _finish(self, found: Transaction, *, commit: bool, now_ms: int) -> None:
        for partition_id in sorted(found.partitions):
            self._log.end_transaction(partition_id, found.producer_id, found.epoch, commit=commit, now_ms=now_ms)
        self._offsets.release(found.id, commit=commit, now_ms=now_ms)
        found.partitions.clear()
        found.started_ms = None
        self._touch(found, now_ms)

    def _open(self, found: Transaction, now_ms: int) -> None:
        if found.started_ms is None:
            found.started_ms = now_ms
        self._touch(found, now_ms)

    def _touch(self, found: Transaction, now_ms: int) -> None:
        found.seen_ms = now_ms
        self._changed.add(found.id)
