"""Indexes by which the match of one record reads a bounded part of a session or a task."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_OF_TASK = sa.text("task_id IS NOT NULL")
_SESSION = ["session_key", "tenant"]


def upgrade() -> None:
    op.drop_index("ix_trajectories_session", "trajectories")
    op.create_index("ix_trajectories_begun", "trajectories", [*_SESSION, "began", "place"])
    op.create_index("ix_trajectories_closed", "trajectories", [*_SESSION, "time_ms", "place"])
    op.drop_index("ix_trajectories_task", "trajectories")
    op.create_index("ix_trajectories_task", "trajectories", ["tenant", "task_id", "partition", "rematch"])
    op.drop_index("ix_feedback_session", "feedback")
    for name in ("turns", "trajectories"):
        op.create_index(f"ix_feedback_{name}", "feedback", [*_SESSION, "lists_turns", f"{name}_until", "place"])
    op.drop_index("ix_feedback_task", "feedback")
    op.create_index(
        "ix_feedback_task",
        "feedback",
        ["tenant", "task_id", "partition", "place"],
        sqlite_where=_OF_TASK,
        postgresql_where=_OF_TASK,
    )
