"""Partial index of the trajectories that wait for rewards, so that finding and counting them reads no other rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_WAITS = sa.text("settle_ms IS NOT NULL")


def upgrade() -> None:
    op.drop_index("ix_trajectories_settle", "trajectories")
    op.create_index(
        "ix_trajectories_settle", "trajectories", ["settle_ms"], sqlite_where=_WAITS, postgresql_where=_WAITS
    )
