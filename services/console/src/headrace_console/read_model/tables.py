"""Tables of the read model. Times are milliseconds since 1970.

Rows refer to each other and to texts that repeat (tenants, models, versions, sources, reasons) by number. A turn, a
trajectory and an experience have packed lists of the numbers of each other instead of tables of pairs. Columns are
ordered by their width, because PostgreSQL aligns them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    literal_column,
    text,
)
from sqlalchemy.types import TypeEngine

from headrace_console.read_model.packing import TAIL_BYTES, pack_key, unpack_key
from headrace_runtime.storage import tables
from headrace_runtime.storage.tables import Id

metadata = MetaData()
positions = tables.positions(metadata)


def _id() -> Column[int]:
    return Column("id", Id, primary_key=True, autoincrement=False)


names = Table(
    "names",
    metadata,
    _id(),
    Column("name", Text, nullable=False, unique=True),
)


class SessionKey(TypeDecorator[str]):
    """Column of session keys, which takes 10 bytes for each."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> bytes | None:
        """Convert a session key to its packed form of 10 bytes for the database."""
        return None if value is None else pack_key(value)

    def process_result_value(self, value: Any, dialect: Any) -> str | None:
        """Convert the packed form from the database to a session key."""
        return None if value is None else unpack_key(bytes(value))


class OftenEqual(TypeDecorator[Any]):
    """Column type that stores its most frequent value as NULL in PostgreSQL, where NULL takes no bytes.

    SQL comparisons use the stored values, so a comparison with the most frequent value does not match its rows.
    """

    impl = SmallInteger
    cache_ok = True

    def __init__(self, kind: type[TypeEngine[Any]], frequent: Any) -> None:
        super().__init__()
        self.kind, self.frequent = kind, frequent

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the type of the stored values."""
        return dialect.type_descriptor(self.kind())

    def coerce_compared_value(self, op: Any, value: Any) -> TypeEngine[Any]:
        """Return the type of the stored values."""
        return self.kind()

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        """Return NULL for the most frequent value if the database is PostgreSQL."""
        return None if value == self.frequent and dialect.name == "postgresql" else value

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        """Return the value of a stored column, with the most frequent value in place of NULL."""
        return self.frequent if value is None else value


sessions = Table(
    "sessions",
    metadata,
    _id(),
    Column("began_ms", BigInteger, nullable=False),  # 0 while no turn is captured
    Column("last_ms", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("reward", Float),  # reward of the experience that changed last
    Column("tenant", Integer, nullable=False),
    Column("model", Integer, nullable=False),
    Column("version", Integer, nullable=False),  # version of the last answer
    Column("turns", Integer, nullable=False),
    Column("trained", OftenEqual(Integer, 0)),
    Column("waiting", OftenEqual(Integer, 0)),
    Column("dropped", OftenEqual(Integer, 0)),
    Column("flags", SmallInteger, nullable=False),
    Column("status", SmallInteger, nullable=False),  # largest index in `STATUSES` among its turns
    Column("thumb", SmallInteger),  # 1, 0, -1; null without feedback
    Column("read_day", SmallInteger, nullable=False),  # when the console read the last event; days since 1970
    Column("session_key", SessionKey, nullable=False),
    Column("session_id", Text),
    Column("task_id", Text),
    Column("title", Text),  # the first characters of the first message
    Column("edits", Text),  # JSON: digests of the valid edits of its answers
    UniqueConstraint("session_key", "tenant", name="uq_sessions_key"),
    Index("ix_sessions_read_day", "read_day"),
    Index("ix_sessions_began", "tenant", "began_ms"),
    Index("ix_sessions_version", "tenant", "version", "began_ms"),
    Index("ix_sessions_status", "tenant", "status", "began_ms"),
    Index(
        "ix_sessions_edits",
        "tenant",
        "began_ms",
        sqlite_where=text("edits IS NOT NULL"),
        postgresql_where=text("edits IS NOT NULL"),
    ),
    *(
        Index(
            f"ix_sessions_{column}",
            "tenant",
            column,
            "began_ms",
            sqlite_where=text(f"{column} IS NOT NULL"),
            postgresql_where=text(f"{column} IS NOT NULL"),
        )
        for column in ("thumb", "task_id")
    ),
)
STATUSES = ("trained", "waiting", "dropped")
FLAGS = {
    name: 1 << bit
    for bit, name in enumerate(
        ("edited", "refused", "candidate", "control", "eval", "abstained", "failed", "parse_error", "timed_out")
    )
}
"""Bits of `sessions.flags`. The last four are outcomes of reward sources."""


def is_no_evaluation(flags: ColumnElement[int]) -> ColumnElement[bool]:
    """Return the condition that a session is no evaluation.

    It is an inequality, because PostgreSQL expects that few rows match an equality of computed values. With an equality
    it would search all sessions of a period, although the newest ones are enough.
    """
    return flags.bitwise_and(FLAGS["eval"]) != FLAGS["eval"]


NAME_START_BYTES = 7
NAME_START: ColumnElement[bytes] = literal_column(f"substr(name, 1, {NAME_START_BYTES})", LargeBinary)
"""First bytes of a packed id or of the end of a response id, which an index contains in place of all bytes."""


def is_named(table: Table, names: Collection[bytes]) -> ColumnElement[bool]:
    """Return the SQL condition that a row has one of these packed names. It can use the index of their first bytes."""
    return table.c.name.in_(names) & NAME_START.in_({name[:NAME_START_BYTES] for name in names})


def _by_name(table: str) -> tuple[UniqueConstraint | Index, ...]:
    """Return the constraint or index of a table's column `name`.

    SQLite gets a unique constraint; PostgreSQL gets an index of half its size, which is not unique.
    """
    unique, index = UniqueConstraint("name"), Index(f"ix_{table}_name", NAME_START)
    return unique.ddl_if(dialect="sqlite"), index.ddl_if(dialect="postgresql")


IS_FOREIGN = text(f"length(name) <> {TAIL_BYTES}")
"""Condition that the name of a turn is not the end of a response id: a turn of another runtime, which was ingested."""

turns = Table(
    "turns",
    metadata,
    _id(),
    Column("session", Id, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("log_offset", BigInteger, nullable=False),  # -1 while its event was not read
    Column("model", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("sampled_tokens", Integer, nullable=False),
    Column("latency_ms", Integer, nullable=False),
    Column("status", Integer, nullable=False),  # 0: not counted
    Column("finish", Integer),
    Column("untrained", Integer),
    Column("no_logprobs", Integer),
    Column("arm", Integer),
    Column("partition", SmallInteger, nullable=False),
    Column("choices", OftenEqual(SmallInteger, 1)),
    Column("eval", OftenEqual(Boolean, False)),
    Column("refused", OftenEqual(Boolean, False)),
    Column("name", LargeBinary, nullable=False),  # the tail of its response id, or another packed id
    Column("trajectories", LargeBinary, nullable=False),
    Column("experiences", LargeBinary, nullable=False),
    Index("ix_turns_session", "session", NAME_START),
    Index("ix_turns_foreign", "name", sqlite_where=IS_FOREIGN, postgresql_where=IS_FOREIGN),
)

trajectories = Table(
    "trajectories",
    metadata,
    _id(),
    Column("session", Id, nullable=False),
    Column("log_offset", BigInteger, nullable=False),
    Column("model", Integer, nullable=False),
    Column("untrained", Integer),
    Column("partition", SmallInteger, nullable=False),
    Column("eval", Boolean, nullable=False),
    Column("ingested", Boolean, nullable=False),
    Column("refused", Boolean, nullable=False),
    Column("name", LargeBinary, nullable=False),  # packed event id
    Column("turns", LargeBinary, nullable=False),
    Column("left_out", Text),  # JSON: number of a turn to the number of the reason
    Column("no_logprobs", Text),
    Index("ix_trajectories_session", "session"),
    *_by_name("trajectories"),
)

experiences = Table(
    "experiences",
    metadata,
    _id(),
    Column("session", Id, nullable=False),  # 0 while only outcomes were read
    Column("log_offset", BigInteger, nullable=False),
    Column("reward", Float),
    Column("weight", OftenEqual(Float, 1.0)),
    Column("revision", OftenEqual(Integer, 0)),
    Column("no_reward", Integer),
    Column("partition", SmallInteger, nullable=False),
    Column("read_day", SmallInteger, nullable=False),
    Column("refused", OftenEqual(Boolean, False)),
    Column("name", LargeBinary, nullable=False),
    Column("turns", LargeBinary, nullable=False),
    Column("history", Text),  # JSON: outcomes by lineage and save, without nulls and empty lists at their ends
    Index("ix_experiences_session", "session"),
    *_by_name("experiences"),
    Index("ix_experiences_stubs", "read_day", sqlite_where=text("session = 0"), postgresql_where=text("session = 0")),
)

rewards = Table(
    "rewards",
    metadata,
    Column("trajectory", Id, nullable=False),
    Column("turn", Id, nullable=False),  # 0: the whole run
    Column("at_ms", BigInteger, nullable=False),
    Column("log_offset", BigInteger, nullable=False),
    Column("value", Float),
    Column("source", Integer, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("outcome", Integer, nullable=False),
    Column("choice", SmallInteger, nullable=False),  # -1: all answers
    Column("partition", SmallInteger, nullable=False),
    PrimaryKeyConstraint("trajectory", "turn", "choice", "source"),
    # PostgreSQL has this index instead of the primary key, because it stores an equal number once.
    Index("ix_rewards_trajectory", "trajectory").ddl_if(dialect="postgresql"),
    sqlite_with_rowid=False,
)

feedback = Table(
    "feedback",
    metadata,
    Column("session", Id, primary_key=True),
    Column("partition", Integer, primary_key=True),
    Column("log_offset", BigInteger, primary_key=True),
    Column("at_ms", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

refusals = Table(
    "refusals",
    metadata,
    Column("name", LargeBinary, primary_key=True),  # packed id of the refused event
    Column("read_day", Integer, nullable=False, index=True),
    sqlite_with_rowid=False,
)

letters = Table(
    "letters",
    metadata,
    _id(),
    Column("name", LargeBinary, nullable=False, unique=True),  # packed event id
    Column("subject", LargeBinary, nullable=False),  # packed id of the refused event; empty in a stub
    Column("service", Integer, nullable=False),
    Column("topic", Integer, nullable=False),
    Column("reason", Integer, nullable=False),
    Column("error", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("log_offset", BigInteger, nullable=False),
    Column("state", SmallInteger, nullable=False),  # index in `LETTER_STATES`
    Column("decisions", Integer, nullable=False),
    Column("read_day", Integer, nullable=False, index=True),
    Index("ix_letters_subject", "subject"),
    Index("ix_letters_group", "state", "service", "topic", "reason", "at_ms"),
)
LETTER_STATES = ("open", "retried", "discarded")

steps = Table(
    "steps",
    metadata,
    Column("lineage", Integer, primary_key=True),
    Column("account", Integer, primary_key=True),
    Column("model", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("version", Integer),
    Column("at_us", BigInteger, nullable=False),
    Column("reward", Float),
    Column("trained", Integer, nullable=False),
    Column("dropped", Text, nullable=False),  # JSON: reason to number
    Column("stopped", Text),
    Index("ix_steps_model", "model", "at_us"),
    Index("ix_steps_version", "version"),
    sqlite_with_rowid=False,
)

trained_revisions = Table(
    "trained_revisions",
    metadata,
    Column("lineage", Integer, primary_key=True),
    Column("save", Integer, primary_key=True),
    Column("experience", Id, primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("advantage", Float),  # null where the report has none
    Index("ix_trained_revisions_experience", "experience"),
    sqlite_with_rowid=False,
)

counts = Table(
    "counts",
    metadata,
    Column("tenant", Integer, primary_key=True),
    Column("model", Integer, primary_key=True),
    Column("lineage", Integer, primary_key=True),  # 0: counts without training; others: differences from these
    Column("status", Integer, primary_key=True),
    Column("turns", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

hours = Table(
    "hours",
    metadata,
    Column("tenant", Integer, primary_key=True),
    Column("source", Integer, primary_key=True),
    Column("hour", Integer, primary_key=True, index=True),
    Column("outcome", Integer, primary_key=True),
    Column("bucket", SmallInteger, primary_key=True),  # value in tenths; `NO_VALUE` for outcomes other than `scored`
    Column("rewards", BigInteger, nullable=False),
    Column("total", Float),  # sum of the values
    sqlite_with_rowid=False,
)
NO_VALUE = -100
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
