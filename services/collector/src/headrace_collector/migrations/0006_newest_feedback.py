"""Index by which the newest feedback of a session is read without the rest of it."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_feedback_session", "feedback")
    op.create_index("ix_feedback_session", "feedback", ["session_key", "used_ms", "source_offset"])
