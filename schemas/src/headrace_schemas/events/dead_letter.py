"""Events of `dead-letters`: refused records, and of `dead-letter-decisions`: operators' decisions about them."""

from __future__ import annotations

import base64
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from headrace_schemas.values.base import Event, LongText, Text
from headrace_schemas.values.bounds import INT32, INT64
from headrace_schemas.values.ids import derived_id


def _check_base64(value: str) -> str:
    try:
        base64.b64decode(value, validate=True)
    except ValueError:
        raise ValueError("is not base64") from None
    return value


Base64 = Annotated[
    str, Field(max_length=2_097_152, json_schema_extra={"contentEncoding": "base64"}), AfterValidator(_check_base64)
]


class DeadLetter(Event):
    """A record that a service refused permanently. An operator can retry or discard it.

    `reason` is a short, stable word, `error` a message for people.
    """

    topic: ClassVar[str] = "dead-letters"
    type: ClassVar[str] = "headrace.dead-letter.v1"

    service: Text
    source_topic: Text
    source_partition: Annotated[int, Field(ge=0), INT32] | None = None
    source_offset: Annotated[int, Field(ge=0), INT64] | None = None
    """None if the record never reached its topic, because its producer refused it."""
    source_id: Text
    """Id of the refused event, or a digest of its bytes if it has no id."""
    source_key: Text | None = None
    headers: dict[Text, LongText] = Field(default_factory=dict, max_length=64)
    value_base64: Base64
    reason: Text
    error: LongText
    attempts: Annotated[int, Field(ge=1), INT32] = 1

    @property
    def value(self) -> bytes:
        return base64.b64decode(self.value_base64)

    @property
    def event_id(self) -> str:
        return derived_id(
            "dead-letter", self.service, self.source_topic, self.source_partition, self.source_offset, self.source_id
        )

    @property
    def key(self) -> str:
        return self.source_key or self.source_id


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
