"""`dead-letter-decisions`: what somebody decided about a dead letter; a letter without one is open."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.base import Event, LongText, Text
from headrace_schemas.ids import derived_id

RETRY_HEADER = "ce_retryof"
"""On a record that was put back onto its topic: the id of the dead letter that it came from."""


class DeadLetterDecision(Event):
    """The newest decision about a letter is the valid one; earlier ones stay as history.

    `retried` is said after the record is back on its topic, so a crash between the two leaves the letter open, and the
    record's id makes a second retry harmless.
    """

    topic: ClassVar[str] = "dead-letter-decisions"
    type: ClassVar[str] = "headrace.dead-letter-decision.v1"

    dead_letter_id: Text
    """`event_id` of the `DeadLetter`."""
    number: Annotated[int, Field(ge=1)]
    """Counts the decisions about this letter, so that one that was sent twice is one."""
    action: Literal["retried", "discarded"]
    reason: LongText | None = None
    """Why; a letter is never discarded without."""
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
