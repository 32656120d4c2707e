"""Tables that every stream processor has: processed event ids, events to publish, jobs to do."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, Table, Text

# SQLite only counts up by itself in an INTEGER primary key.
Id = BigInteger().with_variant(Integer, "sqlite")


def seen(metadata: MetaData) -> Table:
    """Ids of handled events, written in the transaction of their effect (P4)."""
    return Table(
        "seen",
        metadata,
        Column("event_id", Text, primary_key=True),
        Column("at_ms", BigInteger, nullable=False, index=True),
    )


def outbox(metadata: MetaData) -> Table:
    """Events that a committed effect owes to the bus. A row goes once the bus has acknowledged it.

    Ids are never used again: who did not hear that a commit took place, and so does not know its rows, would otherwise
    remove them by the ids of rows that it has sent.
    """
    return Table(
        "outbox",
        metadata,
        Column("id", Id, primary_key=True, autoincrement=True),
        Column("topic", Text, nullable=False),
        Column("key", LargeBinary, nullable=False),
        Column("value", LargeBinary),
        Column("headers", LargeBinary, nullable=False),
        Column("partition", Integer),
        Column("at_ms", BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )


def jobs(metadata: MetaData) -> Table:
    """Slow work that must survive a crash: one row until it is done, leased by whoever works on it."""
    return Table(
        "jobs",
        metadata,
        Column("job_id", Text, primary_key=True),
        Column("kind", Text, nullable=False),
        Column("payload", LargeBinary, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("due_ms", BigInteger, nullable=False),
        Index("ix_jobs_kind_due", "kind", "due_ms"),
    )


def positions(metadata: MetaData) -> Table:
    """The next offset of each partition whose effect is not yet in this database."""
    return Table(
        "positions",
        metadata,
        Column("topic", Text, primary_key=True),
        Column("partition", Integer, primary_key=True),
        Column("next_offset", BigInteger, nullable=False),
    )


class StreamTables:
    """The four, made on a service's metadata."""

    def __init__(self, metadata: MetaData) -> None:
        self.seen = seen(metadata)
        self.outbox = outbox(metadata)
        self.jobs = jobs(metadata)
        self.positions = positions(metadata)
