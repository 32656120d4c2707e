"""Tables of the judge (queue, spending, cached verdicts, pairwise comparisons) with their payloads.

Verdicts are cached by question, so that a question is not paid for twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from sqlalchemy import BigInteger, Boolean, Column, Integer, LargeBinary, MetaData, Table, Text, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_judge.run_transcript import RunTranscript
from headrace_judge.scoring import Judgement
from headrace_judge.verdict import Verdict
from headrace_runtime.clock import epoch_ms
from headrace_runtime.storage.tables import StreamTables, delete_batch, upsert
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event, Reward, Trajectory

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
    Column("contest", Text, primary_key=True),  # digest of rubric, tenant, purpose and task; transactions lock this row
    Column("touched_ms", BigInteger, nullable=False),
)

CONTESTANTS = Table(
    "contestants",
    METADATA,
    Column("rubric", Text, primary_key=True),
    Column("trajectory_id", Text, primary_key=True),
    Column("contest", Text, nullable=False, index=True),
    Column("run", Text, nullable=False),  # trajectories of one run are not compared with each other
    Column("case", LargeBinary, nullable=False),  # RunToJudge as JSON
    Column("arrived_ms", BigInteger, nullable=False),
    Column("closed", Boolean, nullable=False),  # whether the run gets no new pair
    Column("revision", Integer, nullable=False),  # revision of the run's next reward
)

PAIRS = Table(
    "pairs",
    METADATA,
    Column("pair", Text, primary_key=True),
    Column("contest", Text, nullable=False, index=True),
    Column("first", Text, nullable=False),  # trajectory ids
    Column("second", Text, nullable=False),
    Column("made_ms", BigInteger, nullable=False),
    Column("judgement", LargeBinary),  # Judgement of the first run as JSON; NULL until the pair is judged
)

T = TypeVar("T")
VERDICT_JOB = "verdict"
DEADLINE_JOB = "deadline"


async def transact(processor: Processor, work: Callable[[AsyncConnection, datetime], Awaitable[T]]) -> T:
    """Run `work` in a transaction that publishes no events, and return its result after the commit.

    `work` may run more than once, because a failed transaction is repeated.
    """
    results: list[T] = []

    async def step(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        results[:] = [await work(tx, now)]
        return ()

    await processor.step(step)
    return results[0]


def question_digest(body: Mapping[str, object], sample: int) -> str:
    """Return the digest of a question: the request (model, rubric, template, run) and the number of the sample."""
    text = json.dumps([body, sample], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


async def find_verdict(tx: AsyncConnection, question: str) -> Verdict | None:
    """Return the cached verdict on a question, or None if there is none."""
    row = await tx.scalar(select(VERDICTS.c.verdict).where(VERDICTS.c.question == question))
    return None if row is None else Verdict.model_validate_json(row)


async def store_verdict(tx: AsyncConnection, now: datetime, question: str, verdict: Verdict) -> None:
    """Cache the judge's verdict on a question, so that an equal question needs no call."""
    values = {"verdict": verdict.model_dump_json().encode(), "at_ms": epoch_ms(now)}
    await upsert(tx, VERDICTS, {"question": question}, values)


async def delete_old_verdicts(tx: AsyncConnection, now: datetime, retention: timedelta) -> bool:
    """Delete a batch of cached verdicts older than `retention`, and return whether there may be more."""
    return await delete_batch(tx, VERDICTS, VERDICTS.c.at_ms < epoch_ms(now - retention), order=VERDICTS.c.at_ms)


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True)

    def to_json(self) -> bytes:
        return self.model_dump_json().encode()


class Subject(_Stored):
    """A trajectory and the rubric by which it is judged: the object of one reward."""

    rubric: str
    trajectory_id: str
    session_key: str
    tenant: str
    traceparent: str | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, rubric: str, traceparent: str | None = None) -> Subject:
        """Return the subject of a judgement: one trajectory that is judged by one rubric.

        Args:
            trajectory: the trajectory.
            rubric: name of the rubric.
            traceparent: W3C trace context in which the judgement belongs, or None.
        """
        return cls(
            rubric=rubric,
            trajectory_id=trajectory.trajectory_id,
            session_key=trajectory.session_key,
            tenant=trajectory.tenant,
            traceparent=traceparent,
        )

    def reward(self, judgement: Judgement, now: datetime, judged_by: str, revision: int = 0) -> Reward:
        """Return the reward event for a judgement of this trajectory."""
        return Reward(
            time=now,
            trajectory_id=self.trajectory_id,
            session_key=self.session_key,
            tenant=self.tenant,
            source=f"judge:{self.rubric}",
            revision=revision,
            outcome=judgement.outcome,
            value=judgement.value,
            criteria=judgement.criteria,
            reason=judgement.reason,
            judged_by=judged_by,
        )


class RunToJudge(_Stored):
    """A run that is to be judged: its trajectory, rubric and transcript."""

    subject: Subject
    run: RunTranscript


class SingleTask(_Stored):
    """Payload of a job that scores one run."""

    kind: Literal["single"] = "single"
    case: RunToJudge

    @property
    def rubric(self) -> str:
        return self.case.subject.rubric

    @property
    def traceparent(self) -> str | None:
        return self.case.subject.traceparent


class PairTask(_Stored):
    """Payload of a job that compares two runs of the same task."""

    kind: Literal["pair"] = "pair"
    rubric: str
    pair: str
    traceparent: str | None = None
    """Trace of the run that arrived second."""


Task = SingleTask | PairTask
TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
