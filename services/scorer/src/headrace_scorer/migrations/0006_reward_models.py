"""Tables of reward models (features, thumbs, fitted models) and of the agreement between judges and people."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "run_features",
        sa.Column("trajectory_id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("features", sa.Text, nullable=False),
        sa.Column("arrived_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_run_features_newest", "run_features", ["tenant", "arrived_ms", "trajectory_id"])
    op.create_table(
        "thumbs",
        sa.Column("trajectory_id", sa.Text, primary_key=True),
        sa.Column("rater", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("value", sa.Float(precision=53)),
        sa.Column("arrived_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_thumbs_newest", "thumbs", ["tenant", "arrived_ms", "trajectory_id"])
    op.create_table(
        "reward_models",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("fresh", sa.Integer, nullable=False),
        sa.Column("counted", sa.Integer, nullable=False),
        sa.Column("model_id", sa.Text),
        sa.Column("fitted_ms", sa.BigInteger),
        sa.Column("payload", sa.LargeBinary),
    )
    op.create_table(
        "agreement",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("judged_by", sa.Text, primary_key=True),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("drifted_ms", sa.BigInteger),
        sa.Column("changed_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_agreement_changed", "agreement", ["changed_ms"])
    op.create_table(
        "agreement_pairs",
        sa.Column("trajectory_id", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
    )
