"""Tables of the registry: versions, aliases, results of the gate, decisions, routings, the audit log and the leader's
lease.

The tables of rollouts are in `rollout_tables`.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, MetaData, Table, Text, false, true

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
    Column("anchor", Text),  # the best version so far, where it is not the champion
    Column("trials", BigInteger, nullable=False, server_default="0"),  # versions that were compared with the anchor
    Column("lead", Text),  # the champion's evidence against the anchor, as JSON
    Column("family", BigInteger, nullable=False, server_default="0"),  # rollouts against the champion or its equals
)

CHAMPIONS = Table(
    "champions",
    METADATA,
    Column("id", Id, primary_key=True, autoincrement=True),  # the order of their reigns
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
    Column("request", Text, nullable=False),  # what an operator asked for: "", "gate" or "force"
    Column("rollout", Text),  # the kind and share that an operator asked for with it, as JSON
    Column("replaced", Text),  # the champion that it took over from
    Column("registered_ms", BigInteger, nullable=False),
    Column("changed_ms", BigInteger, nullable=False),  # when it came into its state
    Column("trained", Boolean, nullable=False, server_default=true()),  # by a trainer of ours
    Column("label", Text),  # a name for this version alone
    Column("served", Boolean, nullable=False, server_default=false()),  # an operator asked for it to be loaded
    Column("retired_ms", BigInteger),  # it never serves again
    Column("collected_ms", BigInteger),  # its files are gone, or about to go
    Index("ix_versions_model_state", "model", "state"),
    Index("ix_versions_parent", "parent"),
    Index("ux_versions_label", "model", "label", unique=True),
    Index("ix_versions_retired", "retired_ms"),
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
    Column("principal", Text, nullable=False),  # what authentication proves
    Column("who", Text, nullable=False),  # the name that the requester gave
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
    Column("who", Text),  # the operator who asked for it
    Column("rollout", Text),  # RolloutStep as JSON
)

LEASE = Table(
    "lease",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
)
