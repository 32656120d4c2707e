"""Feedback and trajectories keep their places on the log: what was said last, and about what, is told by them.

What is there already has no place: it gets a number below every offset, in the order in which it arrived.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BEFORE_ALL = 10_000_000_000_000
"""More than any time in milliseconds."""


def upgrade() -> None:
    _add("feedback", "place", "turns_until", "trajectories_until")
    _add("trajectories", "place", "began")


def _add(table: str, place: str, *others: str) -> None:
    op.add_column(table, sa.Column(place, sa.BigInteger, nullable=False, server_default="0"))
    for name in others:
        op.add_column(table, sa.Column(name, sa.BigInteger))
    rows = sa.table(table, sa.column(place), sa.column("arrived_ms"))
    op.execute(sa.update(rows).values({place: rows.c.arrived_ms - BEFORE_ALL}))
