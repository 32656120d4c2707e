"""State of producers' transactions. All methods run in the writer's thread.

There is one file and one writer, so a Kafka transaction ends within one SQLite transaction, and needs no prepared
state: after a crash it is either open or ended.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace_broker.errors import Code, Rejected
from headrace_broker.log import Log
from headrace_broker.protocol.groups import CommitTopic
from headrace_broker.topics import CommittedOffsets

_EPOCH_MAX = 32_767


class Owner(NamedTuple):
    """Producer id and epoch of a producer that claims to own a transactional id already."""

    producer_id: int
    epoch: int


@dataclass(slots=True)
class Transaction:
    """State of one transactional id. `started_ms` is the time at which its open transaction began, or None if it has
    none.

    `bumped_from` is the previous epoch of the same owner, which repeats its request with this epoch if it has not
    received the response.
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
    """States of all transactional ids. A call is refused unless it has the latest producer id and epoch of the
    transactional id."""

    def __init__(self, db: sqlite3.Connection, log: Log, offsets: CommittedOffsets) -> None:
        self._db = db
        self._log = log
        self._offsets = offsets
        self._transactions: dict[str, Transaction] = {}
        self._changed: set[str] = set()
        self.reload()

    def reload(self) -> None:
        """Read the committed states of all transactional ids from the file again."""
        rows = self._db.execute(
            "SELECT id, producer_id, epoch, timeout_ms, started_ms, seen_ms, partitions, bumped_from FROM transactions"
        )
        self._transactions = {
            name: Transaction(name, producer_id, epoch, timeout_ms, started_ms, seen_ms, set(json.loads(parts)), bumped)
            for name, producer_id, epoch, timeout_ms, started_ms, seen_ms, parts, bumped in rows
        }
        self._changed.clear()

    def flush(self) -> tuple[()]:
        """Write the changes since the last commit to the file. There is nothing to publish."""
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
                if (t := self._transactions.get(name))
            ],
        )
        self._changed.clear()
        return ()

    def new_producer_id(self) -> int:
        """Return a producer id that was never used."""
        row = self._db.execute(
            "UPDATE meta SET value = value + 1 WHERE name = 'next_producer_id' RETURNING value - 1"
        ).fetchone()
        return int(row[0])

    def all(self) -> list[Transaction]:
        """Return copies of the states of all transactional ids."""
        return [replace(state, partitions=set(state.partitions)) for state in self._transactions.values()]

    def begin_session(self, name: str, timeout_ms: int, now_ms: int, owner: Owner | None = None) -> tuple[int, int]:
        """Make a producer the owner of the transactional id `name`. Return its producer id and epoch.

        If the id had another owner, that is fenced, and its open transaction is aborted. An `owner` that already owns
        the id gets its next epoch.

        Raises:
            Rejected: `owner` no longer owns the id (90).
        """
        transaction = self._transactions.get(name)
        if transaction is None:
            transaction = Transaction(name, self.new_producer_id(), 0, timeout_ms, None, now_ms, set())
            self._transactions[name] = transaction
        elif owner is None or owner == (transaction.producer_id, transaction.epoch):
            self._fence(transaction, now_ms)
            transaction.timeout_ms = timeout_ms
            transaction.bumped_from = owner.epoch if owner else None
        elif owner != (transaction.producer_id, transaction.bumped_from) or transaction.started_ms is not None:
            raise Rejected(
                Code.PRODUCER_FENCED, f"epoch {owner.epoch} of {name} is fenced by epoch {transaction.epoch}"
            )
        self._touch(transaction, now_ms)
        return transaction.producer_id, transaction.epoch

    def add_partitions(self, name: str, producer_id: int, epoch: int, partition_ids: set[int], now_ms: int) -> None:
        """Add partitions to the producer's transaction, which begins unless it is open. Raises `Rejected` with error
        code 47 or 49."""
        transaction = self._owned(name, producer_id, epoch)
        transaction.partitions |= partition_ids
        self._open(transaction, now_ms)

    def add_group(self, name: str, producer_id: int, epoch: int, now_ms: int) -> None:
        """Begin the producer's transaction unless it is open. It will commit offsets of a group.

        Raises:
            Rejected: another producer owns the transactional id (47, 49).
        """
        self._open(self._owned(name, producer_id, epoch), now_ms)

    def check_append(self, name: str | None, partition_id: int, producer_id: int, epoch: int) -> None:
        """Check that a batch may be appended: the partition must have been added to the producer's open transaction.
        Raises `Rejected`."""
        if name is None:
            raise Rejected(Code.INVALID_REQUEST, "a transactional batch needs a request with a transactional id")
        transaction = self._owned(name, producer_id, epoch)
        if transaction.started_ms is None or partition_id not in transaction.partitions:
            raise Rejected(Code.INVALID_TXN_STATE, "the partition is not part of an open transaction")

    def commit_offsets(
        self, name: str, producer_id: int, epoch: int, group_id: str, topics: tuple[CommitTopic, ...]
    ) -> None:
        """Store offsets that are committed if the transaction commits.

        Raises:
            Rejected: another producer owns the transactional id (47, 49), or no transaction is open (48).
        """
        if self._owned(name, producer_id, epoch).started_ms is None:
            raise Rejected(Code.INVALID_TXN_STATE, "no transaction is open")
        self._offsets.add_pending(name, group_id, topics)

    def end(self, name: str, producer_id: int, epoch: int, *, commit: bool, now_ms: int) -> None:
        """Commit or abort the open transaction. Raises `Rejected` with error code 47, 48 or 49."""
        transaction = self._owned(name, producer_id, epoch)
        if transaction.started_ms is None:
            raise Rejected(Code.INVALID_TXN_STATE, "no transaction is open")
        self._finish(transaction, commit=commit, now_ms=now_ms)

    def expire(self, now_ms: int, forget_before_ms: int) -> None:
        """Abort transactions that exceed their timeouts, and fence their producers.

        Args:
            forget_before_ms: transactional ids that were last used before this time are deleted.
        """
        for transaction in list(self._transactions.values()):
            if transaction.started_ms is not None and now_ms - transaction.started_ms > transaction.timeout_ms:
                self._fence(transaction, now_ms)
            elif transaction.started_ms is None and transaction.seen_ms < forget_before_ms:
                del self._transactions[transaction.id]
                self._db.execute("DELETE FROM transactions WHERE id = ?", (transaction.id,))

    def _owned(self, name: str, producer_id: int, epoch: int) -> Transaction:
        """Return the state of a transactional id, after checking that the producer owns it. Raises `Rejected` with
        error code 47 or 49."""
        transaction = self._transactions.get(name)
        if transaction is None or transaction.producer_id != producer_id:
            raise Rejected(Code.INVALID_PRODUCER_ID_MAPPING, f"producer {producer_id} does not own {name}")
        if transaction.epoch != epoch:
            raise Rejected(Code.INVALID_PRODUCER_EPOCH, f"epoch {epoch} is fenced by epoch {transaction.epoch}")
        return transaction

    def _fence(self, transaction: Transaction, now_ms: int) -> None:
        """Increase the epoch of the transactional id, so that its present producer is fenced, and abort its open
        transaction."""
        if transaction.started_ms is not None:
            self._finish(transaction, commit=False, now_ms=now_ms)
        if transaction.epoch < _EPOCH_MAX:
            transaction.epoch += 1
        else:
            transaction.producer_id, transaction.epoch = self.new_producer_id(), 0
        transaction.bumped_from = None
        self._changed.add(transaction.id)

    def _finish(self, transaction: Transaction, *, commit: bool, now_ms: int) -> None:
        producer_id, epoch = transaction.producer_id, transaction.epoch
        for partition_id in sorted(transaction.partitions):
            self._log.end_transaction(partition_id, producer_id, epoch, commit=commit, now_ms=now_ms)
        self._offsets.resolve_pending(transaction.id, commit=commit, now_ms=now_ms)
        transaction.partitions.clear()
        transaction.started_ms = None
        self._touch(transaction, now_ms)

    def _open(self, transaction: Transaction, now_ms: int) -> None:
        if transaction.started_ms is None:
            transaction.started_ms = now_ms
        self._touch(transaction, now_ms)

    def _touch(self, transaction: Transaction, now_ms: int) -> None:
        transaction.seen_ms = now_ms
        self._changed.add(transaction.id)
