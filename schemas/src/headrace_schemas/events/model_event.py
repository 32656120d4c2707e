"""`model-events`: every decision about a version, with the numbers it rests on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace_schemas.base import Event, Finite, LongText, ModelName, Text, Version

Decision = Literal["registered", "probed", "evaluated", "promoted", "rejected", "skipped", "rolled_back", "withdrawn"]


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
    statistics: dict[Text, Finite] = Field(default_factory=dict, max_length=64)

    @property
    def event_id(self) -> str:
        return self.decision_id

    @property
    def key(self) -> str:
        return self.model

    @property
    def subject(self) -> str:
        return self.version
