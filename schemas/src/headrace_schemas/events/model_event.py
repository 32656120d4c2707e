"""Events of `model-events`: all decisions about versions, with their statistics."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headrace_schemas.values.base import Event, Finite, LongText, Model, ModelName, Share, Text, Version
from headrace_schemas.values.bounds import INT32

STATISTICS_MAX = 64
Decision = Literal["registered", "probed", "evaluated", "promoted", "rejected", "skipped", "rolled_back", "withdrawn"]


class RolloutStep(Model):
    """The step of a rollout that a decision was.

    For readers without support of rollouts, `decision` is the equivalent: `probed` for an intermediate step,
    `promoted`, `skipped` for a hold (the version serves no traffic but is not refused), `withdrawn` for a rollback (the
    version and its descendants are refused).
    """

    rollout_id: Text
    kind: Literal["begin", "advance", "promote", "hold", "roll_back"]
    stage: Annotated[int, Field(ge=0), INT32]
    """The stage after the step, from 0."""
    share: Share
    """The candidate's share of all units after the step; 1 for a promotion."""
    excludes: bool = False
    """For a rollback: whether the version's answers are excluded from training, and trained ones are reversed. A later
    promotion of the version ends the exclusion."""


class ModelEvent(Event):
    """One decision about a version. `statistics` are the numbers on which it is based."""

    topic: ClassVar[str] = "model-events"
    type: ClassVar[str] = "headrace.model-event.v1"

    decision_id: Text
    model: ModelName
    version: Version
    decision: Decision
    previous: Version | None = None
    """The version that it is compared with or replaces; for `rolled_back` the version that serves again."""
    reason: LongText | None = None
    statistics: dict[Text, Finite] = Field(default_factory=dict, max_length=STATISTICS_MAX)
    who: Text | None = None
    """The operator who requested the decision, or None if the registry decided."""
    rollout: RolloutStep | None = None

    @property
    def event_id(self) -> str:
        return self.decision_id

    @property
    def key(self) -> str:
        return self.model

    @property
    def subject(self) -> str:
        return self.version
