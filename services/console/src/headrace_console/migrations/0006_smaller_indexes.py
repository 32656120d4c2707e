"""Smaller indexes, and on PostgreSQL columns whose most frequent value is stored as NULL.

No unique key is needed for turns, nor for the names of rows and for rewards on PostgreSQL: one process at a time
writes, under a lock, and it reads a row before it writes it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_NULLABLE = {
    "sessions": ("trained", "waiting", "dropped"),
    "turns": ("choices", "eval", "refused"),
    "experiences": ("weight", "revision", "refused"),
}


def upgrade() -> None:
    op.drop_index("uq_turns_name", "turns")
    op.create_index("ix_turns_session", "turns", ["session"])
    if op.get_context().dialect.name == "postgresql":
        for table, columns in _NULLABLE.items():
            for column in columns:
                op.alter_column(table, column, nullable=True)
        op.drop_constraint("rewards_pkey", "rewards")
        op.create_index("ix_rewards_trajectory", "rewards", ["trajectory"])
        for table in ("trajectories", "experiences"):
            op.drop_constraint(f"{table}_name_key", table)
            op.create_index(f"ix_{table}_name", table, [sa.text("substr(name, 1, 7)")])
