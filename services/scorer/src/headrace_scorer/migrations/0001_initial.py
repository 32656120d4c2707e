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
        "feedback",
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("session_key", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("lists_turns", sa.Boolean, nullable=False),
        sa.Column("arrived_ms", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("ix_feedback_arrived", "feedback", ["arrived_ms"])
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
        "ledger",
        sa.Column("trajectory_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("turn_id", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("value", sa.Float(precision=53)),
        sa.Column("criteria", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("judged_by", sa.Text),
        sa.Column("feedback_id", sa.Text),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("arrived_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("trajectory_id", "tenant", "turn_id", "source", "revision"),
    )
    op.create_index("ix_ledger_arrived", "ledger", ["arrived_ms"])
    op.create_table(
        "listed",
        sa.Column("turn_id", sa.Text, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("turn_id", "event_id"),
    )
    op.create_index("ix_listed_event", "listed", ["event_id"])
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
        "trajectories",
        sa.Column("trajectory_id", sa.Text, nullable=False),
        sa.Column("session_key", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("arrived_ms", sa.BigInteger, nullable=False),
        sa.Column("settle_ms", sa.BigInteger),
        sa.Column("inputs", sa.Text, nullable=False),
        sa.Column("scored_inputs", sa.Text),
        sa.Column("task_id", sa.Text),
        sa.Column("run_id", sa.Text),
        sa.Column("parts", sa.Integer, nullable=False),
        sa.Column("emitted", sa.Text, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("trajectory_id"),
    )
    op.create_index("ix_trajectories_arrived", "trajectories", ["arrived_ms"])
    op.create_index("ix_trajectories_session", "trajectories", ["session_key"])
    op.create_index("ix_trajectories_settle", "trajectories", ["settle_ms"])
    op.create_table(
        "turns",
        sa.Column("turn_id", sa.Text, nullable=False),
        sa.Column("trajectory_id", sa.Text, nullable=False),
        sa.Column("spoken", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("turn_id", "trajectory_id"),
    )
    op.create_index("ix_turns_trajectory", "turns", ["trajectory_id"])
