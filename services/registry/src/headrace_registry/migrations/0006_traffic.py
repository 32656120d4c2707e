"""Add the exposure of a rollout, and a share that is smaller than that of its stage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("turns", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("rollouts", sa.Column("turns_exposed", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("rollouts", sa.Column("share", sa.Text))
