"""Add the anchor of a model, and the results of trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("anchor", sa.Text))
    op.add_column("models", sa.Column("trials", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("models", sa.Column("lead", sa.Text))
    op.create_table(
        "verdicts",
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("gate_sha256", sa.Text, nullable=False),
        sa.Column("verdict", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
    )
