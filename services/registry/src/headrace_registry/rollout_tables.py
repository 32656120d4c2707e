"""Tables of rollouts: rules and phase of each, the units of its arms, their events, and the readings of them."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, LargeBinary, Table, Text

from headrace_registry.tables import METADATA
from headrace_runtime.storage.tables import Id

ROLLOUTS = Table(
    "rollouts",
    METADATA,
    Column("number_id", Id, primary_key=True, autoincrement=True),  # the order in which they began
    Column("rollout_id", Text, nullable=False, unique=True),
    Column("model", Text, nullable=False),
    Column("version", Text, nullable=False, index=True),
    Column("control", Text, nullable=False),  # the champion that it is compared with
    Column("kind", Text, nullable=False),
    Column("plan", Text, nullable=False),  # RolloutPlan as JSON: declared before the first session
    Column("salt", Text, nullable=False),
    Column("slots", BigInteger, nullable=False),
    Column("phase", Text, nullable=False),
    Column("stage", BigInteger, nullable=False),
    Column("slot", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),  # its place in the family
    Column("reason", Text, nullable=False),  # of its last step
    Column("statistics", Text, nullable=False),  # as last looked at, as JSON
    Column("chart", Text, nullable=False),  # points of the confidence sequences, as JSON
    Column("standing", Text, nullable=False),  # the gate's anchor if it becomes champion: records.Standing as JSON
    Column("began_ms", BigInteger, nullable=False),
    Column("changed_ms", BigInteger, nullable=False),  # when it came into its phase and stage
    Column("observed_ms", BigInteger, nullable=False),  # how long its sessions have been watched: its own clock
    Column("stage_observed_ms", BigInteger, nullable=False),  # that clock when the stage began
    Column("shadow", Text, nullable=False, server_default="{}"),  # shadow.findings.ShadowFindings as JSON
    Column("turns", BigInteger, nullable=False, server_default="0"),  # drawn by the split while it went on
    Column("turns_exposed", BigInteger, nullable=False, server_default="0"),  # those that the candidate answered
    Column("share", Text),  # where an adaptive split gives it less than its stage has
    Index("ix_rollouts_model_phase", "model", "phase"),
)

UNITS = Table(
    "rollout_units",
    METADATA,
    Column("rollout_id", Text, primary_key=True),
    Column("unit", Text, primary_key=True),
    Column("candidate", Boolean, nullable=False),
    Column("enrolled_ms", BigInteger, nullable=False),  # by the rollout's clock
    Column("looks", BigInteger, nullable=False),  # how many of the plan's readings were taken
    Column("events", BigInteger, nullable=False),  # how many are stored; -1: the unit is closed
    Index("ix_rollout_units_due", "rollout_id", "looks", "enrolled_ms"),
)

SESSIONS = Table(
    "rollout_sessions",
    METADATA,
    Column("rollout_id", Text, primary_key=True),
    Column("session_key", Text, primary_key=True, index=True),
    Column("unit", Text, nullable=False),
    Column("tenant", Text),  # null for what earlier releases stored
)

EVENTS = Table(
    "rollout_events",
    METADATA,
    Column("id", Id, primary_key=True, autoincrement=True),  # the order in which they were read
    Column("rollout_id", Text, nullable=False),
    Column("unit", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("value", LargeBinary, nullable=False),
    Column("at_ms", BigInteger, nullable=False),  # by the rollout's clock
    Index("ix_rollout_events_unit", "rollout_id", "unit"),
)

READINGS = Table(
    "rollout_readings",
    METADATA,
    Column("id", Id, primary_key=True, autoincrement=True),  # the order in which the statistics take them
    Column("rollout_id", Text, nullable=False),
    Column("look", Text, nullable=False),
    Column("unit", Text, nullable=False),
    Column("candidate", Boolean, nullable=False),
    Column("enrolled_ms", BigInteger, nullable=False),
    Column("found", Text, nullable=False),  # metric to value, as JSON
    Column("expected", Text, nullable=False, server_default="{}"),  # the same, as it was expected
    Index("ix_rollout_readings_order", "rollout_id", "id"),
)

PROMPTS = Table(
    "rollout_prompts",
    METADATA,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("rollout_id", Text, nullable=False),
    Column("place", BigInteger, nullable=False),  # the order in which they were taken, and are read
    Column("session_key", Text, nullable=False),  # the user's
    Column("tenant", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("sampled_ms", BigInteger, nullable=False),  # by the rollout's clock
    Column("answered_ms", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),  # of both answers and what they were answers to
    Column("ended", Text, nullable=False),  # how each answer ended, as JSON
    Column("log_weight", Float),
    Column("found", Text, nullable=False),  # shadow.reading.PromptReading as JSON
    Column("reason", Text, nullable=False),  # why it was left out
    Index("ux_rollout_prompts_place", "rollout_id", "place", unique=True),
    Index("ix_rollout_prompts_state", "rollout_id", "state", "place"),
)
