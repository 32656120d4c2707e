"""Tables of the judge: queue, spending, cached verdicts, and pairwise comparisons."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer, LargeBinary, MetaData, Table, Text

from headrace_runtime.storage.tables import StreamTables

METADATA = MetaData()
STREAM = StreamTables(METADATA)

SPENDING = Table(
    "spending",
    METADATA,
    Column("period", Text, primary_key=True),  # "hour" or "day"
    Column("start_ms", BigInteger, primary_key=True),
    Column("calls", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
)

VERDICTS = Table(
    "verdicts",
    METADATA,
    Column("question", Text, primary_key=True),  # digest of the request and of the number of the sample
    Column("verdict", LargeBinary, nullable=False),  # Verdict as JSON
    Column("at_ms", BigInteger, nullable=False, index=True),
)

CONTESTS = Table(
    "contests",
    METADATA,
    Column("contest", Text, primary_key=True),  # from rubric, tenant, purpose and task; the row is the lock
    Column("touched_ms", BigInteger, nullable=False),
)

CONTESTANTS = Table(
    "contestants",
    METADATA,
    Column("rubric", Text, primary_key=True),
    Column("trajectory_id", Text, primary_key=True),
    Column("contest", Text, nullable=False, index=True),
    Column("run", Text, nullable=False),  # trajectories of one run are not compared with each other
    Column("case", LargeBinary, nullable=False),  # Case as JSON
    Column("arrived_ms", BigInteger, nullable=False),
    Column("closed", Boolean, nullable=False),  # gets no new pair
    Column("revision", Integer, nullable=False),  # of its next reward
)

PAIRS = Table(
    "pairs",
    METADATA,
    Column("pair", Text, primary_key=True),
    Column("contest", Text, nullable=False, index=True),
    Column("first", Text, nullable=False),  # trajectory ids
    Column("second", Text, nullable=False),
    Column("made_ms", BigInteger, nullable=False),
    Column("judgement", LargeBinary),  # Judgement of the first run as JSON; NULL until there is one
)
