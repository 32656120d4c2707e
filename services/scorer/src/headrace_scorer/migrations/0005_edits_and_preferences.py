"""Edits, preferences and rewards of single answers in the ledger, and feedback about tasks.

The ledger gets a longer primary key, so its table is created again and the rows are copied.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_KEPT = """trajectory_id, tenant, turn_id, source, revision, outcome, value, criteria, reason, judged_by, feedback_id,
    time_ms, arrived_ms"""


def upgrade() -> None:
    _ledger()
    op.add_column("trajectories", sa.Column("partition", sa.Integer))
    op.add_column("trajectories", sa.Column("rematch", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index("ix_trajectories_task", "trajectories", ["tenant", "task_id"])
    marked = sa.text("rematch IS TRUE")
    op.create_index(
        "ix_trajectories_rematch", "trajectories", ["trajectory_id"], sqlite_where=marked, postgresql_where=marked
    )
    op.add_column("feedback", sa.Column("task_id", sa.Text))
    op.add_column("feedback", sa.Column("partition", sa.Integer))
    of_task = sa.text("task_id IS NOT NULL")
    op.create_index(
        "ix_feedback_task", "feedback", ["tenant", "task_id"], sqlite_where=of_task, postgresql_where=of_task
    )


def _ledger() -> None:
    op.drop_index("ix_ledger_arrived", "ledger")
    op.rename_table("ledger", "ledger_before")
    op.create_table(
        "ledger",
        sa.Column("trajectory_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False, server_default="reward"),
        sa.Column("turn_id", sa.Text, nullable=False),
        sa.Column("choice", sa.Integer, nullable=False, server_default="-1"),
        sa.Column("subject", sa.Text, nullable=False, server_default=""),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("value", sa.Float(precision=53)),
        sa.Column("criteria", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("judged_by", sa.Text),
        sa.Column("detail", sa.Text),
        sa.Column("feedback_id", sa.Text),
        sa.Column("time_ms", sa.BigInteger, nullable=False),
        sa.Column("arrived_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "trajectory_id", "tenant", "kind", "turn_id", "choice", "subject", "source", "revision", name="ledger_key"
        ),
    )
    op.execute(
        f"INSERT INTO ledger (kind, choice, subject, {_KEPT}) SELECT 'reward', -1, '', {_KEPT} FROM ledger_before"  # noqa: S608 (names of columns)
    )
    op.drop_table("ledger_before")
    op.create_index("ix_ledger_arrived", "ledger", ["arrived_ms"])
