"""An index of the sessions with edited answers, which are few."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_HAS_EDITS = sa.text("edits IS NOT NULL")


def upgrade() -> None:
    columns = ["tenant", "began_ms"]
    op.create_index("ix_sessions_edits", "sessions", columns, sqlite_where=_HAS_EDITS, postgresql_where=_HAS_EDITS)
