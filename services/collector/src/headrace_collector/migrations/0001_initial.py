"""The tables of the first release."""

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
        "ends",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("session_key", sa.Text),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("turns_until", sa.BigInteger, nullable=False),
        sa.Column("feedback_until", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("msg_ids", sa.Text),
        sa.Column("before_ms", sa.BigInteger),
        sa.Column("unseen_since_ms", sa.BigInteger),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_ends_at", "ends", ["at_ms"])
    op.create_table(
        "feedback",
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("session_key", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("source_offset", sa.BigInteger, nullable=False),
        sa.Column("turns_until", sa.BigInteger, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("resolved", sa.Boolean, nullable=False),
        sa.Column("used_ms", sa.BigInteger),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("ix_feedback_resolved", "feedback", ["resolved", "at_ms"])
    op.create_index("ix_feedback_session", "feedback", ["session_key"])
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.create_index("ix_jobs_kind_due", "jobs", ["kind", "due_ms"])
    op.create_table(
        "outbox",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("key", sa.LargeBinary, nullable=False),
        sa.Column("value", sa.LargeBinary),
        sa.Column("headers", sa.LargeBinary, nullable=False),
        sa.Column("partition", sa.Integer),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "positions",
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("topic", "partition"),
    )
    op.create_table(
        "seen",
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("ix_seen_at_ms", "seen", ["at_ms"])
    op.create_table(
        "sessions",
        sa.Column("session_key", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("open_turns", sa.Integer, nullable=False),
        sa.Column("open_completions", sa.Integer, nullable=False),
        sa.Column("open_tokens", sa.BigInteger, nullable=False),
        sa.Column("began_ms", sa.BigInteger, nullable=False),
        sa.Column("seen_ms", sa.BigInteger, nullable=False),
        sa.Column("check_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("session_key"),
    )
    op.create_index("ix_sessions_check", "sessions", ["check_ms"])
    op.create_index("ix_sessions_tenant", "sessions", ["tenant", "partition"])
    op.create_table(
        "turns",
        sa.Column("turn_id", sa.Text, nullable=False),
        sa.Column("session_key", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("explicit", sa.Boolean, nullable=False),
        sa.Column("task_id", sa.Text),
        sa.Column("run_id", sa.Text),
        sa.Column("request_digest", sa.Text, nullable=False),
        sa.Column("retry", sa.Integer, nullable=False),
        sa.Column("delivered", sa.Boolean, nullable=False),
        sa.Column("started_ms", sa.BigInteger, nullable=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("seen_ms", sa.BigInteger, nullable=False),
        sa.Column("completions", sa.Integer, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("prefixes", sa.LargeBinary, nullable=False),
        sa.Column("replies", sa.LargeBinary, nullable=False),
        sa.Column("trajectory_id", sa.Text),
        sa.Column("closed_ms", sa.BigInteger),
        sa.Column("payload", sa.LargeBinary),
        sa.PrimaryKeyConstraint("turn_id"),
    )
    op.create_index("ix_turns_closed", "turns", ["closed_ms"])
    op.create_index("ix_turns_session", "turns", ["session_key"])
