"""Pins and pauses, and the children of a version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("pinned", sa.Text))
    op.add_column("models", sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index("ix_versions_parent", "versions", ["parent"])
