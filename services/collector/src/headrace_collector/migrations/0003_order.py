"""Order turns and sessions by their offset on the log, not by the clocks of gateways.

Rows that exist already have no offset: they get a number below every offset, in the order of their stored time.
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
