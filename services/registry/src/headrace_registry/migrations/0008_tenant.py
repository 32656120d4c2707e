"""Add the tenant of each session in a rollout, so that events of other tenants about it do not count."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollout_sessions", sa.Column("tenant", sa.Text))
