"""`model-events`: every decision about a version, with the numbers it rests on."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headrace_schemas.base import Event, Finite, LongText, Model, ModelName, Share, Text, Version
from headrace_schemas.bounds import INT32

STATISTICS_MAX = 64
Decision = Literal["registered", "probed", "evaluated", "promoted", "rejected", "skipped", "rolled_back", "withdrawn"]


class RolloutStep(Model):
    """Which step of a rollout a decision was. For readers that know nothing of rollouts `decision` says what it comes
    to: `probed` for a step on the way, `promoted`, `skipped` for a hold (it serves nobody, and nothing is said against
    it), `withdrawn` for a rollback (it and what descends from it are out).
    """

    rollout_id: Text
    kind: Literal["begin", "advance", "promote", "hold", "roll_back"]
    stage: Annotated[int, Field(ge=0), INT32]
    """The one that it is in afterwards, from 0."""
    share: Share
    """Of all units, for the candidate, afterwards; 1 for a promotion."""
    excludes: bool = False
    """Of a rollback: nothing that the version answered is trained, and what was is taken back. A promotion of it ends
    that."""


class ModelEvent(Event):
    """One decision about a version. `statistics` are the numbers it is based on."""

    topic: ClassVar[str] = "model-events"
    type: ClassVar[str] = "headrace.model-event.v1"

    decision_id: Text
    model: ModelName
    version: Version
    decision: Decision
    previous: Version | None = None
    """The version it is compared with or takes over from; for `rolled_back` the one that takes over again."""
    reason: LongText | None = None
    statistics: dict[Text, Finite] = Field(default_factory=dict, max_length=STATISTICS_MAX)
    who: Text | None = None
    """The operator who asked for it; None: the registry itself."""
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
