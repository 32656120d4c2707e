"""Response of `GET /sources` of scorer and judge, shared by the services and the SDK."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.values.base import LongText, Model, Text, Timestamp

Count = Annotated[int, Field(ge=0)]


class SourceState(Model):
    """The state of one reward function or rubric since its process started."""

    id: Text
    object: Literal["source"] = "source"
    outcomes: dict[Text, Count] = Field(default_factory=dict)
    """Number of results by outcome. `retried` counts failures of the endpoint after which the work is repeated."""
    failing: Count = 0
    """Number of consecutive failures; 0 after a score or an abstention."""
    last_error: LongText | None = None
    last_error_at: Timestamp | None = None


class SourceList(Model):
    """Response of `GET /sources`."""

    object: Literal["list"] = "list"
    data: tuple[SourceState, ...]
