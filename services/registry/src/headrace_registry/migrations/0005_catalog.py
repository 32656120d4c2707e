"""Add versions without a trainer, labels, aliases, tags, notes, retirement, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("versions", sa.Column("trained", sa.Boolean, nullable=False, server_default=sa.true()))
    op.add_column("versions", sa.Column("label", sa.Text))
    op.add_column("versions", sa.Column("served", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("versions", sa.Column("retired_ms", sa.BigInteger))
    op.add_column("versions", sa.Column("collected_ms", sa.BigInteger))
    op.create_index("ux_versions_label", "versions", ["model", "label"], unique=True)
    op.create_index("ix_versions_retired", "versions", ["retired_ms"])
    op.create_table(
        "aliases",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("alias", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, nullable=False, index=True),
        sa.Column("changed_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "tags",
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("tag", sa.Text, primary_key=True),
    )
    op.create_table(
        "notes",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("version", sa.Text, nullable=False, index=True),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("principal", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False, index=True),
        sa.Column("version", sa.Text),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )
