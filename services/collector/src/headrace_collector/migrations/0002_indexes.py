"""Add indexes for the few rows that timers look for, and for sessions that are in use for ever."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_PARTIAL = (
    ("ix_sessions_open", "sessions", ["seen_ms"], "open_turns > 0"),
    ("ix_sessions_over", "sessions", ["seen_ms"], "open_turns = 0"),
    ("ix_sessions_tenant", "sessions", ["tenant", "partition"], "open_turns > 0"),
    ("ix_turns_kept", "turns", ["closed_ms"], "payload IS NOT NULL"),
)


def upgrade() -> None:
    op.drop_index("ix_sessions_tenant", "sessions")
    for name, table, columns, where in _PARTIAL:
        op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
    op.drop_index("ix_turns_session", "turns")
    op.create_index("ix_turns_session", "turns", ["session_key", "closed_ms"])
    op.drop_index("ix_feedback_session", "feedback")
    op.create_index("ix_feedback_session", "feedback", ["session_key", "used_ms"])
