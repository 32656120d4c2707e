"""Columns for the offsets of feedback and trajectories, which order feedback and match it with trajectories.

Rows that exist already have no offset. They get numbers below every offset, in the order of their arrival.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BEFORE_ALL = 10_000_000_000_000
"""A number larger than any time in milliseconds."""


def upgrade() -> None:
    _add("feedback", "place", "turns_until", "trajectories_until")
    _add("trajectories", "place", "began")


def _add(table: str, offset: str, *nullable: str) -> None:
    op.add_column(table, sa.Column(offset, sa.BigInteger, nullable=False, server_default="0"))
    for name in nullable:
        op.add_column(table, sa.Column(name, sa.BigInteger))
    rows = sa.table(table, sa.column(offset), sa.column("arrived_ms"))
    op.execute(sa.update(rows).values({offset: rows.c.arrived_ms - BEFORE_ALL}))
