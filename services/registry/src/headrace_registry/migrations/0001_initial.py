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
        "models",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("champion", sa.Text),
        sa.Column("previous", sa.Text),
        sa.Column("candidate", sa.Text),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("routing", sa.Text),
    )
    op.create_table(
        "versions",
        sa.Column("number", _ID, primary_key=True, autoincrement=True),
        sa.Column("version", sa.Text, nullable=False, unique=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("lineage", sa.Text, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("parent", sa.Text),
        sa.Column("base", sa.Text),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("tokenizer_sha256", sa.Text, nullable=False),
        sa.Column("template_sha256", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("replaced", sa.Text),
        sa.Column("registered_ms", sa.BigInteger, nullable=False),
        sa.Column("changed_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_versions_model_state", "versions", ["model", "state"])
    op.create_table(
        "evaluations",
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("gate_sha256", sa.Text, nullable=False),
        sa.Column("scores", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "decisions",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("decision_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False, index=True),
        sa.Column("decision", sa.Text, nullable=False),
        sa.Column("previous", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("statistics", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "lease",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
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
