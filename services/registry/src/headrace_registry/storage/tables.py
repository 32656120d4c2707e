"""Tables of the registry.

They contain versions, aliases, results of the gate, decisions, routings, the audit log and the leader's lease, and for
rollouts their rules and phases, the units of their arms, the events of these units, and metric values.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, LargeBinary, MetaData, Table, Text, false, text, true

from headrace_runtime.storage.tables import Id, StreamTables

METADATA = MetaData()
STREAM = StreamTables(METADATA)

MODELS = Table(
    "models",
    METADATA,
    Column("model", Text, primary_key=True),
    Column("champion", Text),
    Column("previous", Text),
    Column("candidate", Text),
    Column("pinned", Text),  # the one version that may be champion
    Column("paused", Boolean, nullable=False, server_default=false()),
    Column("revision", BigInteger, nullable=False),
    Column("routing", Text),  # the last published Routing as JSON
    Column("anchor", Text),  # the last version shown to be better, where it is not the champion
    Column("trials", BigInteger, nullable=False, server_default="0"),  # versions that were compared with the anchor
    Column("lead", Text),  # the champion's evidence against the anchor, as JSON
    Column("family", BigInteger, nullable=False, server_default="0"),  # rollouts against the champion or its equals
)

CHAMPIONS = Table(
    "champions",
    METADATA,
    Column("id", Id, primary_key=True, autoincrement=True),  # the order in which they became champion
    Column("model", Text, nullable=False, index=True),
    Column("version", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)

VERSIONS = Table(
    "versions",
    METADATA,
    Column("number", Id, primary_key=True, autoincrement=True),  # the order of arrival
    Column("version", Text, nullable=False, unique=True),
    Column("model", Text, nullable=False),
    Column("lineage", Text, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("parent", Text),
    Column("base", Text),
    Column("manifest", Text, nullable=False),  # BlobRef as JSON
    Column("tokenizer_sha256", Text, nullable=False),
    Column("template_sha256", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("request", Text, nullable=False),  # request of an operator: "", "gate" or "force"
    Column("rollout", Text),  # kind and share of the requested rollout, as JSON
    Column("replaced", Text),  # the champion that it replaced
    Column("registered_ms", BigInteger, nullable=False),
    Column("changed_ms", BigInteger, nullable=False),  # time at which it entered its state
    Column("trained", Boolean, nullable=False, server_default=true()),  # whether a trainer of ours published it
    Column("label", Text),  # unique name of this version within its model
    Column("served", Boolean, nullable=False, server_default=false()),  # an operator requested that replicas load it
    Column("retired_ms", BigInteger),  # it never serves again
    Column("collected_ms", BigInteger),  # its files were deleted, or are being deleted
    Index("ix_versions_model_state", "model", "state"),
    Index("ix_versions_parent", "parent"),
    Index("ux_versions_label", "model", "label", unique=True),
    Index("ix_versions_retired", "retired_ms"),
)

VERSION_FILES = Table(
    "version_files",
    METADATA,
    Column("version", Text, primary_key=True),
    Column("model", Text, nullable=False, index=True),
    Column("files", Text),  # digests of its files, as a JSON list; NULL if its manifest was never read
    Column("problem", Text),  # why its manifest cannot be read now
)

ALIASES = Table(
    "aliases",
    METADATA,
    Column("model", Text, primary_key=True),
    Column("alias", Text, primary_key=True),
    Column("version", Text, nullable=False, index=True),
    Column("changed_ms", BigInteger, nullable=False),
)

TAGS = Table(
    "tags",
    METADATA,
    Column("version", Text, primary_key=True),
    Column("tag", Text, primary_key=True),
)

NOTES = Table(
    "notes",
    METADATA,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("version", Text, nullable=False, index=True),
    Column("text", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)

AUDIT = Table(
    "audit",
    METADATA,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("at_ms", BigInteger, nullable=False),
    Column("principal", Text, nullable=False),  # identity that the key proves
    Column("who", Text, nullable=False),  # name that the request states
    Column("action", Text, nullable=False),
    Column("model", Text, nullable=False, index=True),
    Column("version", Text),
    Column("why", Text, nullable=False),
    Column("detail", Text, nullable=False),
)

EVALUATIONS = Table(
    "evaluations",
    METADATA,
    Column("version", Text, primary_key=True),
    Column(
        "gate_sha256", Text, nullable=False
    ),  # the gate that measured it; scores of different gates are not comparable
    Column("scores", Text, nullable=False),  # audit task to mean score, as JSON
    Column("at_ms", BigInteger, nullable=False),
)

VERDICTS = Table(
    "verdicts",
    METADATA,
    Column("version", Text, primary_key=True),
    Column("gate_sha256", Text, nullable=False),
    Column("verdict", Text, nullable=False),  # records.TrialResult as JSON
    Column("at_ms", BigInteger, nullable=False),
)

DECISIONS = Table(
    "decisions",
    METADATA,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("decision_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("version", Text, nullable=False, index=True),
    Column("decision", Text, nullable=False),
    Column("previous", Text),
    Column("reason", Text),
    Column("statistics", Text, nullable=False),  # name to number, as JSON
    Column("at_ms", BigInteger, nullable=False),
    Column("who", Text),  # the operator who requested it
    Column("rollout", Text),  # RolloutStep as JSON
)

LEASE = Table(
    "lease",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
)


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
    Column("number", BigInteger, nullable=False),  # its number among rollouts against the same champion
    Column("reason", Text, nullable=False),  # reason of its last step
    Column("statistics", Text, nullable=False),  # statistics of its last evaluation, as JSON
    Column("chart", Text, nullable=False),  # points of the confidence sequences, as JSON
    Column("standing", Text, nullable=False),  # the gate's anchor if it becomes champion: records.Standing as JSON
    Column("began_ms", BigInteger, nullable=False),
    Column("changed_ms", BigInteger, nullable=False),  # time at which it entered its phase and stage
    Column("observed_ms", BigInteger, nullable=False),  # time for which its sessions were read: its own clock
    Column("stage_observed_ms", BigInteger, nullable=False),  # value of this clock when the stage began
    Column("shadow", Text, nullable=False, server_default="{}"),  # shadow.findings.ShadowFindings as JSON
    Column("turns", BigInteger, nullable=False, server_default="0"),  # turns that the split assigned since it began
    Column("turns_exposed", BigInteger, nullable=False, server_default="0"),  # those that the candidate answered
    Column("share", Text),  # share that an adaptive split has set, if below the stage's
    Index("ix_rollouts_model_phase", "model", "phase"),
)

UNITS = Table(
    "rollout_units",
    METADATA,
    Column("rollout_id", Text, primary_key=True),
    Column("unit", Text, primary_key=True),
    Column("candidate", Boolean, nullable=False),
    Column("enrolled_ms", BigInteger, nullable=False),  # by the rollout's clock
    Column("looks", BigInteger, nullable=False),  # number of ages at which its metrics were computed
    Column("events", BigInteger, nullable=False),  # number of stored events; -1 if the unit is closed
    Column("event_bytes", BigInteger, nullable=False, server_default=text("0")),  # bytes of these events
    Index("ix_rollout_units_due", "rollout_id", "looks", "enrolled_ms"),
)

SESSIONS = Table(
    "rollout_sessions",
    METADATA,
    Column("rollout_id", Text, primary_key=True),
    Column("session_key", Text, primary_key=True, index=True),
    Column("unit", Text, nullable=False),
    Column("tenant", Text),  # null in rows of earlier releases
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
    Column("id", Id, primary_key=True, autoincrement=True),  # the order in which the tests add them
    Column("rollout_id", Text, nullable=False),
    Column("look", Text, nullable=False),
    Column("unit", Text, nullable=False),
    Column("candidate", Boolean, nullable=False),
    Column("enrolled_ms", BigInteger, nullable=False),
    Column("found", Text, nullable=False),  # metric to value, as JSON
    Column("expected", Text, nullable=False, server_default="{}"),  # metric to expected value, as JSON
    Index("ix_rollout_readings_order", "rollout_id", "id"),
)

PROMPTS = Table(
    "rollout_prompts",
    METADATA,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("rollout_id", Text, nullable=False),
    Column("place", BigInteger, nullable=False),  # the order in which they were chosen and are evaluated
    Column("session_key", Text, nullable=False),  # session of the user
    Column("tenant", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("sampled_ms", BigInteger, nullable=False),  # by the rollout's clock
    Column("answered_ms", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),  # tokens of both answers and their prompts
    Column("ended", Text, nullable=False),  # how each answer ended, as JSON
    Column("log_weight", Float),
    Column("found", Text, nullable=False),  # shadow.reading.PromptReading as JSON
    Column("reason", Text, nullable=False),  # reason why it was left out
    Index("ux_rollout_prompts_place", "rollout_id", "place", unique=True),
    Index("ix_rollout_prompts_state", "rollout_id", "state", "place"),
)
