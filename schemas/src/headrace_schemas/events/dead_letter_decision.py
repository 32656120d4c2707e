"""`dead-letter-decisions`: decisions of operators about dead letters. A letter without a decision is open."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.base import Event, LongText, Text
from headrace_schemas.bounds import INT32
from headrace_schemas.ids import derived_id

RETRY_HEADER = "ce_retryof"
"""On a record that was put back onto its topic: the id of the dead letter that it came from."""


class DeadLetterDecision(Event):
    """A decision about a letter. The newest one is valid; earlier ones stay as history.

    `retried` is sent after the record is back on its topic. So a crash in between leaves the letter open. A second
    retry is harmless, because the record keeps its id.
    """

    topic: ClassVar[str] = "dead-letter-decisions"
    type: ClassVar[str] = "headrace.dead-letter-decision.v1"

    dead_letter_id: Text
    """`event_id` of the `DeadLetter`."""
    number: Annotated[int, Field(ge=1), INT32]
    """Number of the decision about this letter. A decision that is sent twice keeps its number."""
    action: Literal["retried", "discarded"]
    reason: LongText | None = None
    """The reason. It is required to discard a letter."""
    by: Text | None = None

    @model_validator(mode="after")
    def _discarded_for_a_reason(self) -> Self:
        if self.action == "discarded" and not self.reason:
            raise ValueError("a dead letter is discarded for a reason; say which")
        return self

    @property
    def event_id(self) -> str:
        return derived_id("dead-letter-decision", self.dead_letter_id, self.number, self.action)

    @property
    def key(self) -> str:
        return self.dead_letter_id
