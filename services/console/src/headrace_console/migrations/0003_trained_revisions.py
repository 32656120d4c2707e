"""The revisions that each save was trained on, to list what a version learned from. A later migration fills it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "trained_revisions",
        sa.Column("lineage", sa.Integer, nullable=False),
        sa.Column("save", sa.Integer, nullable=False),
        sa.Column("experience", _ID, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("advantage", sa.Float),
        sa.PrimaryKeyConstraint("lineage", "save", "experience", "revision"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_trained_revisions_experience", "trained_revisions", ["experience"])
    op.create_index("ix_steps_version", "steps", ["version"])
