"""Payloads of the judge's queue."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from headrace_judge.run_transcript import RunTranscript
from headrace_judge.scoring import Judgement
from headrace_schemas import Reward, Trajectory

VERDICT_JOB = "verdict"
DEADLINE_JOB = "deadline"


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True)

    def to_json(self) -> bytes:
        return self.model_dump_json().encode()


class Subject(_Stored):
    """The trajectory and the rubric of a reward."""

    rubric: str
    trajectory_id: str
    session_key: str
    tenant: str
    traceparent: str | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, rubric: str, traceparent: str | None = None) -> Subject:
        """Return the subject of a trajectory and a rubric."""
        return cls(
            rubric=rubric,
            trajectory_id=trajectory.trajectory_id,
            session_key=trajectory.session_key,
            tenant=trajectory.tenant,
            traceparent=traceparent,
        )

    def reward(self, judgement: Judgement, now: datetime, judged_by: str, revision: int = 0) -> Reward:
        """Return the reward event of a judgement."""
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


class Case(_Stored):
    """A run with its transcript."""

    subject: Subject
    run: RunTranscript


class SingleTask(_Stored):
    """Task to score one run."""

    kind: Literal["single"] = "single"
    case: Case

    @property
    def rubric(self) -> str:
        return self.case.subject.rubric

    @property
    def traceparent(self) -> str | None:
        return self.case.subject.traceparent


class PairTask(_Stored):
    """Task to compare two runs of a contest."""

    kind: Literal["pair"] = "pair"
    rubric: str
    pair: str
    traceparent: str | None = None
    """Trace of the run that arrived second."""


Task = SingleTask | PairTask
TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
