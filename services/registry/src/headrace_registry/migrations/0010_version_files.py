"""Add the digests of each version's files, which protect them while the version's manifest cannot be read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "version_files",
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("files", sa.Text),
        sa.Column("problem", sa.Text),
    )
    op.create_index("ix_version_files_model", "version_files", ["model"])
