"""Smaller rows. The topics are read again into the new tables.

Queues and the numbers of names stay. The items of a queue are drawn again, and its verdicts are read from the topic.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_REPLACED = ("sessions", "turns", "trajectories", "experiences", "rewards")
_EMPTIED = (
    "positions", "feedback", "refusals", "letters", "steps", "trained_revisions", "counts", "hours",
    "review_items", "review_verdicts", "review_reservations",
)  # fmt: skip


def upgrade() -> None:
    for table in _REPLACED:
        op.drop_table(table, if_exists=True)
    for table in _EMPTIED:
        op.execute(sa.delete(sa.table(table)))
    _create_sessions()
    is_foreign = sa.text("length(name) <> 16")
    op.create_table(
        "turns",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("session", _ID, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("sampled_tokens", sa.Integer, nullable=False),
        sa.Column("latency_ms", sa.Integer, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("finish", sa.Integer),
        sa.Column("untrained", sa.Integer),
        sa.Column("no_logprobs", sa.Integer),
        sa.Column("arm", sa.Integer),
        sa.Column("partition", sa.SmallInteger, nullable=False),
        sa.Column("choices", sa.SmallInteger, nullable=False),
        sa.Column("eval", sa.Boolean, nullable=False),
        sa.Column("refused", sa.Boolean, nullable=False),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("trajectories", sa.LargeBinary, nullable=False),
        sa.Column("experiences", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("uq_turns_name", "turns", ["session", "name"], unique=True)
    op.create_index("ix_turns_foreign", "turns", ["name"], sqlite_where=is_foreign, postgresql_where=is_foreign)
    op.create_table(
        "trajectories",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("session", _ID, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("untrained", sa.Integer),
        sa.Column("partition", sa.SmallInteger, nullable=False),
        sa.Column("eval", sa.Boolean, nullable=False),
        sa.Column("ingested", sa.Boolean, nullable=False),
        sa.Column("refused", sa.Boolean, nullable=False),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("turns", sa.LargeBinary, nullable=False),
        sa.Column("left_out", sa.Text),
        sa.Column("no_logprobs", sa.Text),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_index("ix_trajectories_session", "trajectories", ["session"])
    op.create_table(
        "experiences",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("session", _ID, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("no_reward", sa.Integer),
        sa.Column("partition", sa.SmallInteger, nullable=False),
        sa.Column("read_day", sa.SmallInteger, nullable=False),
        sa.Column("refused", sa.Boolean, nullable=False),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("turns", sa.LargeBinary, nullable=False),
        sa.Column("history", sa.Text),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_index("ix_experiences_session", "experiences", ["session"])
    is_stub = sa.text("session = 0")
    op.create_index("ix_experiences_stubs", "experiences", ["read_day"], sqlite_where=is_stub, postgresql_where=is_stub)
    op.create_table(
        "rewards",
        sa.Column("trajectory", _ID, nullable=False),
        sa.Column("turn", _ID, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("value", sa.Float),
        sa.Column("source", sa.Integer, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Integer, nullable=False),
        sa.Column("choice", sa.SmallInteger, nullable=False),
        sa.Column("partition", sa.SmallInteger, nullable=False),
        sa.PrimaryKeyConstraint("trajectory", "turn", "choice", "source"),
        sqlite_with_rowid=False,
    )


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("began_ms", sa.BigInteger, nullable=False),
        sa.Column("last_ms", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.Column("trained", sa.Integer, nullable=False),
        sa.Column("waiting", sa.Integer, nullable=False),
        sa.Column("dropped", sa.Integer, nullable=False),
        sa.Column("flags", sa.SmallInteger, nullable=False),
        sa.Column("status", sa.SmallInteger, nullable=False),
        sa.Column("thumb", sa.SmallInteger),
        sa.Column("read_day", sa.SmallInteger, nullable=False),
        sa.Column("session_key", sa.LargeBinary, nullable=False),
        sa.Column("session_id", sa.Text),
        sa.Column("task_id", sa.Text),
        sa.Column("title", sa.Text),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("session_key", "tenant", name="uq_sessions_key"),
    )
    op.create_index("ix_sessions_read_day", "sessions", ["read_day"])
    for name, columns in (
        ("began", ["began_ms"]),
        ("version", ["version", "began_ms"]),
        ("status", ["status", "began_ms"]),
    ):
        op.create_index(f"ix_sessions_{name}", "sessions", ["tenant", *columns])
    for name in ("thumb", "task_id"):
        is_set = sa.text(f"{name} IS NOT NULL")
        op.create_index(
            f"ix_sessions_{name}",
            "sessions",
            ["tenant", name, "began_ms"],
            sqlite_where=is_set,
            postgresql_where=is_set,
        )
