"""The scorer's tables. Times are milliseconds since 1970."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    false,
    text,
)

from headrace_runtime.storage.tables import StreamTables

metadata = MetaData()
stream = StreamTables(metadata)

_WAITS = text("settle_ms IS NOT NULL")  # only a few of the stored trajectories
REMATCH = text("rematch IS TRUE")
"""Condition of the index. A query uses the index only if it contains exactly this text."""
_OF_TASK = text("task_id IS NOT NULL")

trajectories = Table(
    "trajectories",
    metadata,
    Column("trajectory_id", Text, primary_key=True),
    Column("session_key", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("time_ms", BigInteger, nullable=False),  # when it was closed
    Column("place", BigInteger, nullable=False),  # offset on `trajectories`
    Column("began", BigInteger),  # offset of its first turn on `turns`; null if it was ingested
    Column("arrived_ms", BigInteger, nullable=False),
    Column("settle_ms", BigInteger),  # time at which waiting for rewards ends; null after it, or if nothing is trained
    Column("inputs", Text, nullable=False),  # digest of the feedback that reward functions read
    Column("scored_inputs", Text),  # digest of the feedback with which the reward functions were called
    Column("task_id", Text),
    Column("run_id", Text),
    Column("partition", Integer),  # partition of its record; null in rows of the first releases
    Column("rematch", Boolean, nullable=False, server_default=false()),  # whether it is matched and scored again
    Column("parts", Integer, nullable=False),
    Column("emitted", Text, nullable=False),  # JSON: the last experience of each branch
    Column("payload", LargeBinary, nullable=False),
    Index("ix_trajectories_begun", "session_key", "tenant", "began", "place"),
    Index("ix_trajectories_closed", "session_key", "tenant", "time_ms", "place"),
    Index("ix_trajectories_settle", "settle_ms", sqlite_where=_WAITS, postgresql_where=_WAITS),
    Index("ix_trajectories_arrived", "arrived_ms"),
    Index("ix_trajectories_task", "tenant", "task_id", "partition", "trajectory_id"),
    Index("ix_trajectories_rematch", "trajectory_id", sqlite_where=REMATCH, postgresql_where=REMATCH),
)

task_rematches = Table(  # the tasks whose runs are matched again, because of new feedback about them
    "task_rematches",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("task_id", Text, primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False),
    Column("after", Text, nullable=False),  # the last trajectory that was matched again
    Column("until", Text, nullable=False),  # the last one of the round; it began after this one
    Column("wrapped", Boolean, nullable=False),  # whether the round continues from the first one
    Column("turn", BigInteger, nullable=False),  # the task with the lowest one is next
    Index("ix_task_rematches_turn", "turn"),
    Index("ix_task_rematches_tenant", "tenant", "turn"),
)

turns = Table(
    "turns",
    metadata,
    Column("turn_id", Text, primary_key=True),
    Column("trajectory_id", Text, primary_key=True),
    Column("spoken", Boolean, nullable=False),  # whether the turn is in a branch
    Index("ix_turns_trajectory", "trajectory_id"),
)

turn_owners = Table(
    "turn_owners",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("turn_id", Text, primary_key=True),
    Column("trajectory_id", Text, nullable=False),  # the only trajectory that contains the turn
    Index("ix_turn_owners_trajectory", "trajectory_id"),
)

feedback = Table(
    "feedback",
    metadata,
    Column("event_id", Text, primary_key=True),
    Column("session_key", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("lists_turns", Boolean, nullable=False),
    Column("place", BigInteger, nullable=False),  # offset on `feedback`: later feedback has a higher one
    Column("turns_until", BigInteger),  # end offset of `turns` when it was sent
    Column("trajectories_until", BigInteger),  # end offset of `trajectories` then; null without a gateway
    Column("task_id", Text),  # set if the feedback is about all runs of a task
    Column("partition", Integer),  # then: the partition of this copy
    Column("arrived_ms", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Index("ix_feedback_turns", "session_key", "tenant", "lists_turns", "turns_until", "place"),
    Index("ix_feedback_trajectories", "session_key", "tenant", "lists_turns", "trajectories_until", "place"),
    Index("ix_feedback_arrived", "arrived_ms"),
    Index(
        "ix_feedback_task", "tenant", "task_id", "partition", "place", sqlite_where=_OF_TASK, postgresql_where=_OF_TASK
    ),
)

listed = Table(
    "listed",
    metadata,
    Column("turn_id", Text, primary_key=True),
    Column("event_id", Text, primary_key=True),
    Index("ix_listed_event", "event_id"),
)

ledger = Table(
    "ledger",
    metadata,
    Column("trajectory_id", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("kind", Text, primary_key=True),  # `reward`, `edit` or `preference`
    Column("turn_id", Text, primary_key=True),  # empty: the reward is about the whole trajectory
    Column("choice", Integer, primary_key=True, autoincrement=False),  # -1: about no single answer
    Column("subject", Text, primary_key=True),  # the rater of an edit, the id of a preference; else empty
    Column("source", Text, primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("outcome", Text, nullable=False),
    Column("value", Float(53)),
    Column("criteria", Text),  # JSON
    Column("reason", Text),
    Column("judged_by", Text),
    Column("detail", Text),  # the message of an edit as JSON, the side of a preference
    Column("feedback_id", Text),  # digest of the feedback events that the entry was computed from
    Column("time_ms", BigInteger, nullable=False),
    Column("arrived_ms", BigInteger, nullable=False),
    Index("ix_ledger_arrived", "arrived_ms"),
)

run_features = Table(
    "run_features",
    metadata,
    Column("trajectory_id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("features", Text, nullable=False),  # JSON
    Column("arrived_ms", BigInteger, nullable=False),  # time at which its trajectory arrived
    Index("ix_run_features_newest", "tenant", "arrived_ms", "trajectory_id"),
)

thumbs = Table(
    "thumbs",
    metadata,
    Column("trajectory_id", Text, primary_key=True),
    Column("rater", Text, primary_key=True),  # empty: people without a name
    Column("tenant", Text, nullable=False),
    Column("value", Float(53)),  # null: withdrawn
    Column("arrived_ms", BigInteger, nullable=False),  # time of the last change
    Index("ix_thumbs_newest", "tenant", "arrived_ms", "trajectory_id"),
)

reward_models = Table(
    "reward_models",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("fresh", Integer, nullable=False),  # number of thumbs that changed since the last fit
    Column("counted", Integer, nullable=False),  # number of thumbs of the last fit
    Column("model_id", Text),  # null before the first fit, like the following columns
    Column("fitted_ms", BigInteger),
    Column("payload", LargeBinary),
)

agreement = Table(
    "agreement",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("judged_by", Text, primary_key=True),  # name of the judge: another model or prompt is another judge
    Column("state", Text, nullable=False),  # JSON
    Column("drifted_ms", BigInteger),  # when the alarm was raised
    Column("changed_ms", BigInteger, nullable=False),
    Index("ix_agreement_changed", "changed_ms"),
)

agreement_pairs = Table(
    "agreement_pairs",
    metadata,
    Column("trajectory_id", Text, primary_key=True),
    Column("source", Text, primary_key=True),
)
