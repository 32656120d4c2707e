"""The tables of the read model, apart from those that a later migration replaces."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "counts",
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("lineage", sa.Integer, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("turns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "model", "lineage", "status"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "feedback",
        sa.Column("session", _ID, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("session", "partition", "log_offset"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "hours",
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("source", sa.Integer, nullable=False),
        sa.Column("hour", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Integer, nullable=False),
        sa.Column("bucket", sa.SmallInteger, nullable=False),
        sa.Column("rewards", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "source", "hour", "outcome", "bucket"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_hours_hour", "hours", ["hour"])
    op.create_table(
        "names",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "positions",
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("topic", "partition"),
    )
    op.create_table(
        "refusals",
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("read_day", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("name"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_refusals_read_day", "refusals", ["read_day"])
    op.create_table(
        "steps",
        sa.Column("lineage", sa.Integer, nullable=False),
        sa.Column("account", sa.Integer, nullable=False),
        sa.Column("model", sa.Integer, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("trained", sa.Integer, nullable=False),
        sa.Column("dropped", sa.Text, nullable=False),
        sa.Column("stopped", sa.Text),
        sa.PrimaryKeyConstraint("lineage", "account"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_steps_model", "steps", ["model", "at_us"])
