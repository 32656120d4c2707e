"""Table of the tasks whose runs are matched with their feedback again, and the index of the runs of a task."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "task_rematches",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("task_id", sa.Text, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("after", sa.Text, nullable=False),
        sa.Column("until", sa.Text, nullable=False),
        sa.Column("wrapped", sa.Boolean, nullable=False),
        sa.Column("turn", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_task_rematches_turn", "task_rematches", ["turn"])
    op.create_index("ix_task_rematches_tenant", "task_rematches", ["tenant", "turn"])
    op.drop_index("ix_trajectories_task", "trajectories")
    op.create_index("ix_trajectories_task", "trajectories", ["tenant", "task_id", "partition", "trajectory_id"])
