"""The tables of the read model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "counts",
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("lineage", sa.Integer, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("turns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "model", "lineage", "status"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "experiences",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("event", sa.LargeBinary),
        sa.Column("session", _ID, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("no_reward", sa.Integer),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("refused", sa.Boolean, nullable=False),
        sa.Column("turns", sa.LargeBinary, nullable=False),
        sa.Column("history", sa.Text),
        sa.Column("read_day", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_index("ix_experiences_event", "experiences", ["event"])
    op.create_index("ix_experiences_session", "experiences", ["session", "id"])
    op.create_index(
        "ix_experiences_stubs",
        "experiences",
        ["read_day"],
        sqlite_where=sa.text("session = 0"),
        postgresql_where=sa.text("session = 0"),
    )
    op.create_table(
        "feedback",
        sa.Column("session", _ID, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("session", "partition", "log_offset"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "hours",
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("source", sa.Integer, nullable=False),
        sa.Column("hour", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Integer, nullable=False),
        sa.Column("bucket", sa.SmallInteger, nullable=False),
        sa.Column("rewards", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "source", "hour", "outcome", "bucket"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_hours_hour", "hours", ["hour"])
    op.create_table(
        "names",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "positions",
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("topic", "partition"),
    )
    op.create_table(
        "refusals",
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("read_day", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("name"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_refusals_read_day", "refusals", ["read_day"])
    op.create_table(
        "rewards",
        sa.Column("session", _ID, nullable=False),
        sa.Column("trajectory", _ID, nullable=False),
        sa.Column("turn", _ID, nullable=False),
        sa.Column("choice", sa.Integer, nullable=False),
        sa.Column("source", sa.Integer, nullable=False),
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Integer, nullable=False),
        sa.Column("value", sa.Float),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("session", "trajectory", "turn", "choice", "source"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "sessions",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("session_key", sa.Text, nullable=False),
        sa.Column("session_id", sa.Text),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("began_ms", sa.BigInteger, nullable=False),
        sa.Column("last_ms", sa.BigInteger, nullable=False),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("trained", sa.Integer, nullable=False),
        sa.Column("waiting", sa.Integer, nullable=False),
        sa.Column("dropped", sa.Integer, nullable=False),
        sa.Column("status", sa.SmallInteger, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("thumb", sa.SmallInteger),
        sa.Column("flags", sa.Integer, nullable=False),
        sa.Column("task_id", sa.Text),
        sa.Column("title", sa.Text),
        sa.Column("read_day", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("session_key", "tenant", name="uq_sessions_key"),
    )
    op.create_index("ix_sessions_began", "sessions", ["tenant", "began_ms"])
    op.create_index("ix_sessions_read_day", "sessions", ["read_day"])
    op.create_index("ix_sessions_status", "sessions", ["tenant", "status", "began_ms"])
    op.create_index(
        "ix_sessions_task_id",
        "sessions",
        ["tenant", "task_id", "began_ms"],
        sqlite_where=sa.text("task_id IS NOT NULL"),
        postgresql_where=sa.text("task_id IS NOT NULL"),
    )
    op.create_index(
        "ix_sessions_thumb",
        "sessions",
        ["tenant", "thumb", "began_ms"],
        sqlite_where=sa.text("thumb IS NOT NULL"),
        postgresql_where=sa.text("thumb IS NOT NULL"),
    )
    op.create_index("ix_sessions_version", "sessions", ["tenant", "version", "began_ms"])
    op.create_table(
        "steps",
        sa.Column("lineage", sa.Integer, nullable=False),
        sa.Column("account", sa.Integer, nullable=False),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("trained", sa.Integer, nullable=False),
        sa.Column("dropped", sa.Text, nullable=False),
        sa.Column("stopped", sa.Text),
        sa.PrimaryKeyConstraint("lineage", "account"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_steps_model", "steps", ["model", "at_us"])
    op.create_table(
        "trajectories",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("session", _ID, nullable=False),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("eval", sa.Boolean, nullable=False),
        sa.Column("ingested", sa.Boolean, nullable=False),
        sa.Column("refused", sa.Boolean, nullable=False),
        sa.Column("untrained", sa.Integer),
        sa.Column("turns", sa.LargeBinary, nullable=False),
        sa.Column("left_out", sa.Text),
        sa.Column("no_logprobs", sa.Text),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_index("ix_trajectories_session", "trajectories", ["session", "id"])
    op.create_table(
        "turns",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("session", _ID, nullable=False),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("sampled_tokens", sa.Integer, nullable=False),
        sa.Column("eval", sa.Boolean, nullable=False),
        sa.Column("refused", sa.Boolean, nullable=False),
        sa.Column("untrained", sa.Integer),
        sa.Column("no_logprobs", sa.Integer),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("finish", sa.Integer),
        sa.Column("latency_ms", sa.Integer, nullable=False),
        sa.Column("arm", sa.Integer),
        sa.Column("trajectories", sa.LargeBinary, nullable=False),
        sa.Column("experiences", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name", "tenant", name="uq_turns_name"),
    )
    op.create_index("ix_turns_session", "turns", ["session", "at_ms"])
