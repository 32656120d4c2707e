"""Tables of every stream service: processed event ids, unsent events, jobs and positions."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, Table, Text

# SQLite increments only INTEGER primary keys automatically.
Id = BigInteger().with_variant(Integer, "sqlite")


def seen(metadata: MetaData) -> Table:
    """Define the table of handled event ids, which are written in the transaction of their effect (P4)."""
    return Table(
        "seen",
        metadata,
        Column("event_id", Text, primary_key=True),
        Column("at_ms", BigInteger, nullable=False, index=True),
    )


def outbox(metadata: MetaData) -> Table:
    """Define the table of events of committed effects, which are deleted once the bus has acknowledged them.

    Ids are never reused. Otherwise a process that is not informed of its last commit could delete the rows of that
    commit by the ids of rows that it has sent.
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
    """Define the table of durable jobs. A row exists until its job is finished, and a worker leases it."""
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
    """Define the table of positions: the first offset of each partition whose effect is not in this database."""
    return Table(
        "positions",
        metadata,
        Column("topic", Text, primary_key=True),
        Column("partition", Integer, primary_key=True),
        Column("next_offset", BigInteger, nullable=False),
    )


class StreamTables:
    """The four tables in the metadata of one service."""

    def __init__(self, metadata: MetaData) -> None:
        self.seen = seen(metadata)
        self.outbox = outbox(metadata)
        self.jobs = jobs(metadata)
        self.positions = positions(metadata)
