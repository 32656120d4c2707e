"""Table of the trajectory that owns each turn. A turn belongs to one trajectory."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "turn_owners",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("turn_id", sa.Text, nullable=False),
        sa.Column("trajectory_id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "turn_id"),
    )
    op.execute(
        "INSERT INTO turn_owners (tenant, turn_id, trajectory_id)"
        " SELECT trajectories.tenant, turns.turn_id, min(turns.trajectory_id) FROM turns"
        " JOIN trajectories ON trajectories.trajectory_id = turns.trajectory_id"
        " GROUP BY trajectories.tenant, turns.turn_id"
    )
    op.create_index("ix_turn_owners_trajectory", "turn_owners", ["trajectory_id"])
