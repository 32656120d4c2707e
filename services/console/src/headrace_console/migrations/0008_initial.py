"""The tables of the read model and of review queues, as the first release of the console has them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = None
branch_labels = None
depends_on = None

_TYPES: dict[str, sa.types.TypeEngine[Any]] = {
    "id": sa.BigInteger().with_variant(sa.Integer, "sqlite"),
    "big": sa.BigInteger(),
    "int": sa.Integer(),
    "small": sa.SmallInteger(),
    "float": sa.Float(),
    "bool": sa.Boolean(),
    "text": sa.Text(),
    "bytes": sa.LargeBinary(),
}
"""Types by the names that `_TABLES` uses."""
_TABLES = {
    "sessions": (
        "id:id began_ms:big last_ms:big tokens:big reward:float? tenant:int model:int version:int turns:int "
        "trained:int? waiting:int? dropped:int? flags:small status:small thumb:small? read_day:small session_key:bytes "
        "session_id:text? task_id:text? title:text? edits:text?"
    ),
    "turns": (
        "id:id session:id at_ms:big log_offset:big model:int version:int prompt_tokens:int sampled_tokens:int "
        "latency_ms:int status:int finish:int? untrained:int? no_logprobs:int? arm:int? partition:small choices:small? "
        "eval:bool? refused:bool? name:bytes trajectories:bytes experiences:bytes"
    ),
    "trajectories": (
        "id:id session:id log_offset:big model:int untrained:int? partition:small eval:bool ingested:bool refused:bool "
        "name:bytes turns:bytes left_out:text? no_logprobs:text?"
    ),
    "experiences": (
        "id:id session:id log_offset:big reward:float? weight:float? revision:int? no_reward:int? partition:small "
        "read_day:small refused:bool? name:bytes turns:bytes history:text?"
    ),
    "letters": (
        "id:id name:bytes subject:bytes service:int topic:int reason:int error:text at_ms:big partition:int "
        "log_offset:big state:small decisions:int read_day:int"
    ),
    "names": "id:id name:text",
    "review_queues": "id:id tenant:int name:text rules:text closed:bool created_ms:big",
    "positions": "topic:text partition:int next_offset:big",
    "rewards": (
        "trajectory:id turn:id at_ms:big log_offset:big value:float? source:int revision:int outcome:int choice:small "
        "partition:small"
    ),
    "feedback": "session:id partition:int log_offset:big at_ms:big",
    "refusals": "name:bytes read_day:int",
    "steps": (
        "lineage:int account:int model:int step:int version:int? at_us:big reward:float? trained:int dropped:text "
        "stopped:text?"
    ),
    "trained_revisions": "lineage:int save:int experience:id revision:int advantage:float?",
    "counts": "tenant:int model:int lineage:int status:int turns:big",
    "hours": "tenant:int source:int hour:int outcome:int bucket:small rewards:big total:float?",
    "review_items": "name:bytes tenant:int queue:text position:int session:id turn:id drawn_at_random:bool",
    "review_verdicts": (
        "item:bytes rater:text number:int session:id answer:text? repeated:bool at_ms:big log_offset:big"
    ),
    "review_reservations": "item:bytes rater:text session:id until_ms:big skipped:bool repeated:bool",
}
"""Columns of each table, each with its type; a question mark permits NULL."""
_KEYS = {
    "positions": "topic partition",
    "rewards": "trajectory turn choice source",
    "feedback": "session partition log_offset",
    "refusals": "name",
    "steps": "lineage account",
    "trained_revisions": "lineage save experience revision",
    "counts": "tenant model lineage status",
    "hours": "tenant source hour outcome bucket",
    "review_items": "name",
    "review_verdicts": "item rater number",
    "review_reservations": "item rater",
}
"""Primary key of each table whose key is not `id`."""
_UNIQUE = {
    "sessions": ("uq_sessions_key", "session_key tenant"),
    "names": (None, "name"),
    "letters": (None, "name"),
    "review_queues": ("uq_review_queues_name", "tenant name"),
}
_NAME_START = "substr(name, 1, 7)"
_INDEXES = {
    "sessions": (
        ("read_day", "read_day", ""),
        ("began", "tenant began_ms", ""),
        ("version", "tenant version began_ms", ""),
        ("status", "tenant status began_ms", ""),
        ("edits", "tenant began_ms", "edits IS NOT NULL"),
        ("thumb", "tenant thumb began_ms", "thumb IS NOT NULL"),
        ("task_id", "tenant task_id began_ms", "task_id IS NOT NULL"),
    ),
    "turns": (("session", f"session,{_NAME_START}", ""), ("foreign", "name", "length(name) <> 16")),
    "trajectories": (("session", "session", ""),),
    "experiences": (("session", "session", ""), ("stubs", "read_day", "session = 0")),
    "refusals": (("read_day", "read_day", ""),),
    "letters": (
        ("read_day", "read_day", ""),
        ("subject", "subject", ""),
        ("group", "state service topic reason at_ms", ""),
    ),
    "steps": (("model", "model at_us", ""), ("version", "version", "")),
    "trained_revisions": (("experience", "experience", ""),),
    "hours": (("hour", "hour", ""),),
    "review_items": (("queue", "tenant queue position", ""), ("session", "session", "")),
    "review_verdicts": (("session", "session", ""),),
    "review_reservations": (("session", "session", ""),),
}
"""End of the name, columns and condition of each index."""
_ON_POSTGRESQL = {
    "rewards": ("trajectory", "trajectory", ""),
    "trajectories": ("name", _NAME_START, ""),
    "experiences": ("name", _NAME_START, ""),
}
"""Smaller index that PostgreSQL has in place of the primary key of `rewards` and of a unique constraint of `name`."""


def upgrade() -> None:
    is_postgresql = op.get_context().dialect.name == "postgresql"
    for table, columns in _TABLES.items():
        indexes = [*_INDEXES.get(table, ())]
        constraints: list[sa.Constraint] = [sa.PrimaryKeyConstraint(*_KEYS.get(table, "id").split())]
        if is_postgresql and table in _ON_POSTGRESQL:
            indexes.append(_ON_POSTGRESQL[table])
            constraints = [] if table == "rewards" else constraints
        elif table in ("trajectories", "experiences"):
            constraints.append(sa.UniqueConstraint("name"))
        if table in _UNIQUE:
            name, key = _UNIQUE[table]
            constraints.append(sa.UniqueConstraint(*key.split(), name=name))
        has_row_ids = table == "positions" or table not in _KEYS
        op.create_table(table, *map(_column, columns.split()), *constraints, sqlite_with_rowid=has_row_ids)
        for name, key, condition in indexes:
            where = sa.text(condition) if condition else None
            keys = [sa.text(key)] if "(" in key else key.split()
            op.create_index(f"ix_{table}_{name}", table, keys, sqlite_where=where, postgresql_where=where)


def _column(text: str) -> sa.Column[Any]:
    name, _, kind = text.partition(":")
    return sa.Column(name, _TYPES[kind.removesuffix("?")], nullable=kind.endswith("?"), autoincrement=False)
