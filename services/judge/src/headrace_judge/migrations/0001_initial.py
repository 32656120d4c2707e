"""The tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "spending",
        sa.Column("period", sa.Text, primary_key=True),
        sa.Column("start_ms", sa.BigInteger, primary_key=True),
        sa.Column("calls", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "verdicts",
        sa.Column("question", sa.Text, primary_key=True),
        sa.Column("verdict", sa.LargeBinary, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "contests",
        sa.Column("contest", sa.Text, primary_key=True),
        sa.Column("touched_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "contestants",
        sa.Column("rubric", sa.Text, primary_key=True),
        sa.Column("trajectory_id", sa.Text, primary_key=True),
        sa.Column("contest", sa.Text, nullable=False, index=True),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("case", sa.LargeBinary, nullable=False),
        sa.Column("arrived_ms", sa.BigInteger, nullable=False),
        sa.Column("closed", sa.Boolean, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
    )
    op.create_table(
        "pairs",
        sa.Column("pair", sa.Text, primary_key=True),
        sa.Column("contest", sa.Text, nullable=False, index=True),
        sa.Column("first", sa.Text, nullable=False),
        sa.Column("second", sa.Text, nullable=False),
        sa.Column("made_ms", sa.BigInteger, nullable=False),
        sa.Column("judgement", sa.LargeBinary),
    )
    _stream_tables()


def _stream_tables() -> None:
    op.create_table(
        "seen",
        sa.Column("event_id", sa.Text, primary_key=True),
        sa.Column("at_ms", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "outbox",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("key", sa.LargeBinary, nullable=False),
        sa.Column("value", sa.LargeBinary),
        sa.Column("headers", sa.LargeBinary, nullable=False),
        sa.Column("partition", sa.Integer),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_jobs_kind_due", "jobs", ["kind", "due_ms"])
    op.create_table(
        "positions",
        sa.Column("topic", sa.Text, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
    )
