"""The bodies of everything that judges or ends sessions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from headrace_gateway.identity import LABEL
from headrace_schemas.base import Finite, LongText, Model, Text

TARGETS_MAX = 4095
"""Response ids in one feedback, one less than an event can carry."""
_EPOCH_MS_FROM = 100_000_000_000
"""Numbers from here on are milliseconds since 1970 (1973 in seconds would be year 5138)."""


def _number(value: Any) -> Any:
    """Numbers only: a client that sends "NaN" or "0.5" in quotes has a bug that must not become a reward."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError("must be a number")
    return value


def _label(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Value = Annotated[Finite | None, BeforeValidator(_number)]
Id = Annotated[str, BeforeValidator(_label), StringConstraints(pattern=LABEL)]
"""An id; numbers become text, as Trinity's clients send run ids either way."""


class FeedbackRequest(Model):
    """`POST /v1/feedback`. At least one of the first three says what it is about."""

    session_id: Id | None = None
    msg_ids: tuple[Id, ...] = Field(default=(), max_length=TARGETS_MAX)
    response_id: Id | None = None
    """Short for `msg_ids` with one element."""
    value: Value = None
    source: Id = "feedback"
    task_id: Id | None = None
    run_id: Id | None = None
    comment: LongText | None = None
    context: dict[Text, JsonValue] = Field(default_factory=dict, max_length=64)
    ends_session: bool = False
    withdrawn: bool = False
    feedback_id: Id | None = None
    """Makes the client's own retries harmless: equal ids are one feedback."""

    @model_validator(mode="after")
    def _says_something_about_something(self) -> Self:
        if not (self.session_id or self.targets):
            raise ValueError("one of session_id, msg_ids and response_id must say what this is about")
        if self.withdrawn and self.value is not None:
            raise ValueError("a withdrawn feedback has no value")
        facts = (self.task_id, self.run_id, self.comment, self.context, self.ends_session, self.withdrawn)
        if self.value is None and not any(facts):
            raise ValueError("this says nothing; send a value, or withdrawn, ends_session, context, task_id or run_id")
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        return self.msg_ids + ((self.response_id,) if self.response_id else ())


class TrinityFeedback(Model):
    """`POST /feedback` as Trinity-RFT's and AgentScope's clients send it (COMPAT parts A2 and B)."""

    model_config = ConfigDict(extra="ignore")

    msg_ids: tuple[Id, ...] = Field(max_length=TARGETS_MAX)
    reward: Annotated[Finite, BeforeValidator(_number)]
    task_id: Id | None = None
    run_id: Id | None = None


class TrinityCommit(Model):
    """`POST /commit`. Trinity commits everything whatever the body says; `time_threshold` can only hold some back."""

    model_config = ConfigDict(extra="ignore")

    task_id: Id | None = None
    run_id: Id | None = None
    time_threshold: float | str | None = None

    @property
    def before(self) -> datetime | None:
        """Raises `ValueError` for a threshold that is no time."""
        threshold = self.time_threshold
        if threshold is None:
            return None
        if isinstance(threshold, str):
            parsed = datetime.fromisoformat(threshold)
            return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
        return datetime.fromtimestamp(threshold / 1000 if threshold >= _EPOCH_MS_FROM else threshold, UTC)
