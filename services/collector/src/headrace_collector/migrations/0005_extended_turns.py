"""Store turns that extend another turn, and how much the open turns of a session add."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turns", sa.Column("extends", sa.Text))
    op.add_column("turns", sa.Column("shared_messages", sa.Integer, nullable=False, server_default="0"))
    op.add_column("turns", sa.Column("sequences", sa.Integer, nullable=False, server_default="1"))
    op.add_column("turns", sa.Column("added_tokens", sa.Integer, nullable=False, server_default="0"))
    op.add_column("turns", sa.Column("continued", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("sessions", sa.Column("open_sequences", sa.Integer, nullable=False, server_default="0"))
    op.add_column("sessions", sa.Column("open_added", sa.BigInteger, nullable=False, server_default="0"))
    op.execute("UPDATE turns SET sequences = completions, added_tokens = tokens WHERE closed_ms IS NULL")
    op.execute("UPDATE sessions SET open_sequences = open_completions WHERE open_turns > 0")
