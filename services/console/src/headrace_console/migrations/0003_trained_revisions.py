"""The revisions that each save was trained on, to list what a version learned from. Filled from the stored outcomes."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_ROWS_AT_ONCE = 1_000
_OUTCOME = 0


def upgrade() -> None:
    trained = op.create_table(
        "trained_revisions",
        sa.Column("lineage", sa.Integer, nullable=False),
        sa.Column("save", sa.Integer, nullable=False),
        sa.Column("experience", _ID, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("advantage", sa.Float),
        sa.PrimaryKeyConstraint("lineage", "save", "experience", "revision"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_trained_revisions_experience", "trained_revisions", ["experience"])
    op.create_index("ix_steps_version", "steps", ["version"])
    _fill(op.get_bind(), trained)


def _fill(connection: sa.Connection, trained: sa.Table) -> None:
    """Insert the trained revisions that are in the column `experiences.history`, a portion of the table at a time."""
    experiences = sa.table("experiences", sa.column("id"), sa.column("history"))
    last = -1
    while True:
        portion = sa.select(experiences).where(experiences.c.id > last).order_by(experiences.c.id).limit(_ROWS_AT_ONCE)
        rows = connection.execute(portion).all()
        if not rows:
            return
        last = rows[-1].id
        # An entry has the lineage, the save, the kind, the revision and the reason of a drop.
        keys: dict[tuple[int, ...], dict[str, Any]] = {
            (entry[0], entry[1], row.id, entry[3]): {
                "lineage": entry[0],
                "save": entry[1],
                "experience": row.id,
                "revision": entry[3],
            }
            for row in rows
            for entry in json.loads(row.history or "[]")
            if entry[2] == _OUTCOME and entry[4] is None
        }
        if keys:
            connection.execute(sa.insert(trained), list(keys.values()))
