"""Store the role of a turn in its session: side calls, sub-agents, and repeated requests.

Turns that exist already have none of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("side_call", "agent", "repeats"):
        op.add_column("turns", sa.Column(name, sa.Text))
