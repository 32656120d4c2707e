"""Add the prompts of a shadow, its findings, and the expected values of a canary's units."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("shadow", sa.Text, nullable=False, server_default="{}"))
    op.add_column("rollout_readings", sa.Column("expected", sa.Text, nullable=False, server_default="{}"))
    op.create_table(
        "rollout_prompts",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("place", sa.BigInteger, nullable=False),
        sa.Column("session_key", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("sampled_ms", sa.BigInteger, nullable=False),
        sa.Column("answered_ms", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("ended", sa.Text, nullable=False),
        sa.Column("log_weight", sa.Float),
        sa.Column("found", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )
    op.create_index("ux_rollout_prompts_place", "rollout_prompts", ["rollout_id", "place"], unique=True)
    op.create_index("ix_rollout_prompts_state", "rollout_prompts", ["rollout_id", "state", "place"])
