"""`GET /sources` of scorer and judge: the state of each source of rewards. The services and the SDK share it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.base import LongText, Model, Text, Timestamp

Count = Annotated[int, Field(ge=0)]


class SourceState(Model):
    """One reward function or rubric since its process started."""

    id: Text
    object: Literal["source"] = "source"
    outcomes: dict[Text, Count] = Field(default_factory=dict)
    """Counts by outcome. `retried`: the endpoint failed, and the work will be done again."""
    failing: Count = 0
    """How many times in a row it has failed; 0 after it has scored or abstained."""
    last_error: LongText | None = None
    last_error_at: Timestamp | None = None


class SourceList(Model):
    """`GET /sources`."""

    object: Literal["list"] = "list"
    data: tuple[SourceState, ...]
