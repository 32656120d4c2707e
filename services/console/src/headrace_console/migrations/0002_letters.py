"""The table of dead letters. Letters that were read before it existed are read again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "letters",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("subject", sa.LargeBinary, nullable=False),
        sa.Column("service", sa.Integer, nullable=False),
        sa.Column("topic", sa.Integer, nullable=False),
        sa.Column("reason", sa.Integer, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("log_offset", sa.BigInteger, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("decisions", sa.Integer, nullable=False),
        sa.Column("read_day", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_index("ix_letters_group", "letters", ["state", "service", "topic", "reason", "at_ms"])
    op.create_index("ix_letters_read_day", "letters", ["read_day"])
    op.create_index("ix_letters_subject", "letters", ["subject"])
    op.execute("DELETE FROM positions WHERE topic IN ('dead-letters', 'dead-letter-decisions')")
