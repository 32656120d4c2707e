"""Turns and sessions are ordered by their place on the log, in place of what gateways' clocks said.

What is there already has no place: it gets a number below every offset, in the order of the time that was kept.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BEFORE_ALL = 10_000_000_000_000
"""More than any time in milliseconds."""


def upgrade() -> None:
    for table, column, was in (("turns", "place", "started_ms"), ("sessions", "began", "began_ms")):
        op.add_column(table, sa.Column(column, sa.BigInteger, nullable=False, server_default="0"))
        rows = sa.table(table, sa.column(column), sa.column(was))
        op.execute(sa.update(rows).values({column: rows.c[was] - BEFORE_ALL}))
        op.drop_column(table, was)
