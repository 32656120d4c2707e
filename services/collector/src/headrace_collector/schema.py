"""Tables of the collector. Times are milliseconds since 1970."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    literal_column,
    text,
)

from headrace_runtime.storage.tables import Id, StreamTables

metadata = MetaData()
stream = StreamTables(metadata)


def _partial(name: str, *columns: str, where: str) -> Index:
    """Return a partial index, for the few rows that a timer looks for.

    The database uses it only for queries whose condition is written exactly like `where`, without a parameter
    (`IS_OPEN`, `IS_OVER`).
    """
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


sessions = Table(
    "sessions",
    metadata,
    Column("session_key", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("open_turns", Integer, nullable=False),
    Column("open_completions", Integer, nullable=False),
    Column("open_tokens", BigInteger, nullable=False),
    Column("open_sequences", Integer, nullable=False),  # completions that continue no other one
    Column("open_added", BigInteger, nullable=False),  # tokens that each open turn adds to the one that it extends
    Column("began", BigInteger, nullable=False),  # offset of its first turn
    Column("seen_ms", BigInteger, nullable=False),
    Column("check_ms", BigInteger),  # time of the next check for idle runs; null while no run is open
    Index("ix_sessions_check", "check_ms"),
    _partial("ix_sessions_open", "seen_ms", where="open_turns > 0"),
    _partial("ix_sessions_over", "seen_ms", where="open_turns = 0"),
    _partial("ix_sessions_tenant", "tenant", "partition", where="open_turns > 0"),
)

IS_OPEN = sessions.c.open_turns > literal_column("0")
IS_OVER = sessions.c.open_turns == literal_column("0")

turns = Table(
    "turns",
    metadata,
    Column("turn_id", Text, primary_key=True),
    Column("session_key", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("explicit", Boolean, nullable=False),
    Column("task_id", Text),
    Column("run_id", Text),
    Column("request_digest", Text, nullable=False),
    Column("retry", Integer, nullable=False),
    Column("delivered", Boolean, nullable=False),
    Column("place", BigInteger, nullable=False),  # offset on `turns`
    Column("time_ms", BigInteger, nullable=False),
    Column("seen_ms", BigInteger, nullable=False),
    Column("completions", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("prefixes", LargeBinary, nullable=False),
    Column("replies", LargeBinary, nullable=False),
    Column("side_call", Text),
    Column("agent", Text),
    Column("repeats", Text),
    Column("trajectory_id", Text),  # null while the run is open
    Column("closed_ms", BigInteger),
    Column("payload", LargeBinary),  # the event; null once a closed run's retention is over
    Column("extends", Text),  # the turn whose prompt it continues; an open turn extends open turns only
    Column(
        "shared_messages", Integer, nullable=False
    ),  # messages shared with that turn; `prefixes` lacks their digests
    Column("sequences", Integer, nullable=False),
    Column("added_tokens", Integer, nullable=False),
    Column("continued", Boolean, nullable=False, server_default=text("false")),  # whether a turn continues an answer
    Index("ix_turns_session", "session_key", "closed_ms"),
    Index("ix_turns_closed", "closed_ms"),
    _partial("ix_turns_kept", "closed_ms", where="payload IS NOT NULL"),
)

feedback = Table(
    "feedback",
    metadata,
    Column("event_id", Text, primary_key=True),
    Column("session_key", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("source_offset", BigInteger, nullable=False),  # orders feedback: later feedback has a higher offset
    Column("turns_until", BigInteger, nullable=False),  # turns before this offset were sent before the feedback
    Column("at_ms", BigInteger, nullable=False),
    Column("resolved", Boolean, nullable=False),  # whether the turn or session that it is about is known
    Column("used_ms", BigInteger),  # time at which the last run that it can be about was closed
    Column("payload", LargeBinary, nullable=False),
    Index("ix_feedback_session", "session_key", "used_ms", "source_offset"),
    Index("ix_feedback_resolved", "resolved", "at_ms"),
)

ends = Table(
    "ends",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("tenant", Text, nullable=False),
    Column("session_key", Text),  # null: every session of the tenant that has feedback
    Column("partition", Integer, nullable=False),
    Column("turns_until", BigInteger, nullable=False),
    Column("feedback_until", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("msg_ids", Text),  # JSON; only runs with one of these turns
    Column("before_ms", BigInteger),  # only runs whose last turn is not newer
    Column("unseen_since_ms", BigInteger),  # only runs without a turn since then
    Column("at_ms", BigInteger, nullable=False),
    Index("ix_ends_at", "at_ms"),
)
