"""Add rollouts on live traffic, the history of champions, and the operator of a decision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("models", sa.Column("family", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("versions", sa.Column("rollout", sa.Text))
    op.add_column("decisions", sa.Column("who", sa.Text))
    op.add_column("decisions", sa.Column("rollout", sa.Text))
    op.create_table(
        "champions",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("model", sa.Text, nullable=False, index=True),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
    )
    _remember_champions()
    _rollouts()
    _rollout_rows()


def _remember_champions() -> None:
    """Fill the table of former champions, by following the version that each champion replaced."""
    bind = op.get_bind()
    models, versions, champions = (
        sa.table("models", *map(sa.column, ("model", "champion", "previous"))),
        sa.table("versions", *map(sa.column, ("version", "replaced", "changed_ms"))),
        sa.table("champions", *map(sa.column, ("model", "version", "at_ms"))),
    )
    known = {row.version: row for row in bind.execute(sa.select(versions))}
    for model in bind.execute(sa.select(models)).all():
        line = [model.champion] if model.champion in known else []
        before = model.previous
        while before in known and before not in line:
            line.append(before)
            before = known[before].replaced
        rows = [{"model": model.model, "version": one, "at_ms": known[one].changed_ms} for one in reversed(line)]
        if rows:
            bind.execute(sa.insert(champions), rows)


def _rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("number_id", _ID, primary_key=True, autoincrement=True),
        sa.Column("rollout_id", sa.Text, nullable=False, unique=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False, index=True),
        sa.Column("control", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("plan", sa.Text, nullable=False),
        sa.Column("salt", sa.Text, nullable=False),
        sa.Column("slots", sa.BigInteger, nullable=False),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("stage", sa.BigInteger, nullable=False),
        sa.Column("slot", sa.BigInteger, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("statistics", sa.Text, nullable=False),
        sa.Column("chart", sa.Text, nullable=False),
        sa.Column("standing", sa.Text, nullable=False),
        sa.Column("began_ms", sa.BigInteger, nullable=False),
        sa.Column("changed_ms", sa.BigInteger, nullable=False),
        sa.Column("observed_ms", sa.BigInteger, nullable=False),
        sa.Column("stage_observed_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_rollouts_model_phase", "rollouts", ["model", "phase"])


def _rollout_rows() -> None:
    op.create_table(
        "rollout_units",
        sa.Column("rollout_id", sa.Text, primary_key=True),
        sa.Column("unit", sa.Text, primary_key=True),
        sa.Column("candidate", sa.Boolean, nullable=False),
        sa.Column("enrolled_ms", sa.BigInteger, nullable=False),
        sa.Column("looks", sa.BigInteger, nullable=False),
        sa.Column("events", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_rollout_units_due", "rollout_units", ["rollout_id", "looks", "enrolled_ms"])
    op.create_table(
        "rollout_sessions",
        sa.Column("rollout_id", sa.Text, primary_key=True),
        sa.Column("session_key", sa.Text, primary_key=True, index=True),
        sa.Column("unit", sa.Text, nullable=False),
    )
    op.create_table(
        "rollout_events",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("unit", sa.Text, nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_rollout_events_unit", "rollout_events", ["rollout_id", "unit"])
    op.create_table(
        "rollout_readings",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("rollout_id", sa.Text, nullable=False),
        sa.Column("look", sa.Text, nullable=False),
        sa.Column("unit", sa.Text, nullable=False),
        sa.Column("candidate", sa.Boolean, nullable=False),
        sa.Column("enrolled_ms", sa.BigInteger, nullable=False),
        sa.Column("found", sa.Text, nullable=False),
    )
    op.create_index("ix_rollout_readings_order", "rollout_readings", ["rollout_id", "id"])
