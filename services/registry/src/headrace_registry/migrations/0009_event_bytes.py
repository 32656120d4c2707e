"""Add the bytes of the events of each unit, so that no event reads the sizes of all earlier ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollout_units", sa.Column("event_bytes", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    op.execute(
        "UPDATE rollout_units SET event_bytes = coalesce((SELECT sum(length(value)) FROM rollout_events WHERE"
        " rollout_events.rollout_id = rollout_units.rollout_id AND rollout_events.unit = rollout_units.unit), 0)"
    )
