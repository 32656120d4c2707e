"""The tables of review queues. Verdicts that were read before they existed are not read again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "review_queues",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("rules", sa.Text, nullable=False),
        sa.Column("closed", sa.Boolean, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("tenant", "name", name="uq_review_queues_name"),
    )
    op.create_table(
        "review_items",
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("tenant", sa.Integer, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("session", _ID, nullable=False),
        sa.Column("turn", _ID, nullable=False),
        sa.Column("drawn_at_random", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("name"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_review_items_queue", "review_items", ["tenant", "queue", "position"])
    op.create_index("ix_review_items_session", "review_items", ["session"])
    op.create_table(
        "review_verdicts",
        sa.Column("item", sa.LargeBinary, nullable=False),
        sa.Column("rater", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("session", _ID, nullable=False),
        sa.Column("answer", sa.Text),
        sa.Column("repeated", sa.Boolean, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("item", "rater", "number"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_review_verdicts_session", "review_verdicts", ["session"])
    op.create_table(
        "review_reservations",
        sa.Column("item", sa.LargeBinary, nullable=False),
        sa.Column("rater", sa.Text, nullable=False),
        sa.Column("session", _ID, nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        sa.Column("skipped", sa.Boolean, nullable=False),
        sa.Column("repeated", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("item", "rater"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_review_reservations_session", "review_reservations", ["session"])
