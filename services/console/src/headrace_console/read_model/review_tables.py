"""Tables of review queues. Times are milliseconds since 1970, and sessions, turns and tenants are numbers as elsewhere.

An item is one session of a queue. A verdict is one answer of a rater about an item; the one with the highest number is
valid. Verdicts can be read again from the topic; queues and reservations exist here alone.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, LargeBinary, Table, Text, UniqueConstraint

from headrace_console.read_model.tables import metadata
from headrace_runtime.storage.tables import Id

queues = Table(
    "review_queues",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=False),
    Column("tenant", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("rules", Text, nullable=False),  # JSON of `QueueRules`
    Column("closed", Boolean, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    UniqueConstraint("tenant", "name", name="uq_review_queues_name"),
)

items = Table(
    "review_items",
    metadata,
    Column("name", LargeBinary, primary_key=True),  # packed `item_id`
    Column("tenant", Integer, nullable=False),
    Column("queue", Text, nullable=False),
    Column("position", Integer, nullable=False),  # 0: the item was added by a verdict on the topic, not drawn
    Column("session", Id, nullable=False),
    Column("turn", Id, nullable=False),  # 0: a verdict about the session, whose turn is not known
    Column("drawn_at_random", Boolean, nullable=False),
    Index("ix_review_items_queue", "tenant", "queue", "position"),
    Index("ix_review_items_session", "session"),
    sqlite_with_rowid=False,
)

verdicts = Table(
    "review_verdicts",
    metadata,
    Column("item", LargeBinary, primary_key=True),
    Column("rater", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("session", Id, nullable=False),
    Column("answer", Text),  # null: withdrawn
    Column("repeated", Boolean, nullable=False),  # the second rating of a pair, with swapped sides
    Column("at_ms", BigInteger, nullable=False),
    Column("log_offset", BigInteger, nullable=False),  # -1 until its event was read
    Index("ix_review_verdicts_session", "session"),
    sqlite_with_rowid=False,
)

reservations = Table(
    "review_reservations",
    metadata,
    Column("item", LargeBinary, primary_key=True),
    Column("rater", Text, primary_key=True),
    Column("session", Id, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
    Column("skipped", Boolean, nullable=False),
    Column("repeated", Boolean, nullable=False),
    Index("ix_review_reservations_session", "session"),
    sqlite_with_rowid=False,
)
