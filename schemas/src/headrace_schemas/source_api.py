"""How sources of rewards fare, as scorer and judge answer it: `GET /sources`. They and the SDK share these models."""

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
    """How often it ended how. `retried` is no outcome yet: the endpoint failed, and the work is done again."""
    failing: Count = 0
    """How often in a row it has just failed; 0 once it has spoken or abstained."""
    last_error: LongText | None = None
    last_error_at: Timestamp | None = None


class SourceList(Model):
    """`GET /sources`."""

    object: Literal["list"] = "list"
    data: tuple[SourceState, ...]
