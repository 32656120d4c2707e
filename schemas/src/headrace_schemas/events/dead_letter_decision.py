"""Events of `dead-letter-decisions`: operators' decisions about dead letters."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.base import Event, LongText, Text
from headrace_schemas.bounds import INT32
from headrace_schemas.ids import derived_id

RETRY_HEADER = "ce_retryof"
"""Header of a record that was put back onto its topic, with the id of its dead letter."""


class DeadLetterDecision(Event):
    """A decision about a dead letter. The newest one is valid; earlier ones stay as history.

    A letter without a decision is open. `retried` is sent once the record is back on its topic, so a crash in between
    leaves the letter open. A second retry is harmless, because the record keeps its id.
    """

    topic: ClassVar[str] = "dead-letter-decisions"
    type: ClassVar[str] = "headrace.dead-letter-decision.v1"

    dead_letter_id: Text
    """`event_id` of the `DeadLetter`."""
    number: Annotated[int, Field(ge=1), INT32]
    """Number of this decision among the decisions about the letter. It stays the same if the decision is sent twice."""
    action: Literal["retried", "discarded"]
    reason: LongText | None = None
    """The reason, which is required for `discarded`."""
    by: Text | None = None

    @model_validator(mode="after")
    def _discarded_for_a_reason(self) -> Self:
        if self.action == "discarded" and not self.reason:
            raise ValueError("reason: is required to discard a dead letter")
        return self

    @property
    def event_id(self) -> str:
        return derived_id("dead-letter-decision", self.dead_letter_id, self.number, self.action)

    @property
    def key(self) -> str:
        return self.dead_letter_id
