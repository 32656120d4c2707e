"""Bodies of requests that send feedback or end sessions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, JsonValue, StrictInt, StringConstraints, model_validator

from headrace_schemas import Message
from headrace_schemas.events.feedback import check_values
from headrace_schemas.events.opinion import (
    CHOICE_MAX,
    ChoiceIndex,
    ComparedAnswer,
    Kind,
    Level,
    Metric,
    Preference,
    rule_error,
)
from headrace_schemas.values.base import LongText, Model, Text
from headrace_schemas.values.bounds import CONTEXT_KEYS_MAX, JSON_BOUNDS, Score
from headrace_schemas.values.ids import NAME

TARGETS_MAX = 4095
"""Maximum number of response ids in one feedback, one less than an event can contain."""
_EPOCH_MS_FROM = 100_000_000_000
"""Numbers from this value on are times in milliseconds since 1970, smaller ones in seconds. As seconds it would be the
year 5138."""


def _number(value: Any) -> Any:
    """Return `value` if it is a number. Raise `ValueError` for a text such as "NaN" or "0.5", because it shows a bug of
    the client."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError("must be a number")
    return value


def _label(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _number_or_thumb(value: Any) -> Any:
    """Return a number. True (thumbs up) is 1, and false (thumbs down) is 0."""
    return float(value) if isinstance(value, bool) else _number(value)


def _answer(value: Any) -> Any:
    """Return an edited answer as a message. A text becomes the content of the message, and missing fields get their
    defaults."""
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    if not isinstance(value, dict):
        return value
    calls = value.get("tool_calls")
    if isinstance(calls, list):
        named = [{"id": f"call_{at}", **call} if isinstance(call, dict) else call for at, call in enumerate(calls)]
        value = {**value, "tool_calls": named}
    return {"role": "assistant", **value}


Number = Annotated[Score, BeforeValidator(_number)]
Value = Annotated[Score | None, BeforeValidator(_number_or_thumb)]
Id = Annotated[str, BeforeValidator(_label), StringConstraints(pattern=NAME)]
"""Id. A number becomes a text, because Trinity's clients send run ids in both forms."""


class AnswerOfResponse(Model):
    """Reference to one answer (choice) of a response."""

    response_id: Id
    choice: ChoiceIndex = 0


Side = (
    Annotated[StrictInt, Field(ge=0, le=CHOICE_MAX)]
    | Annotated[str, StringConstraints(pattern=NAME)]
    | AnswerOfResponse
)
"""One answer of a preference: the index of a choice of `response_id`, the id of another response (its first answer), or
a response id with a choice."""


class PreferenceRequest(Model):
    """Preference between two answers, in the form of a request."""

    chosen: Side
    rejected: Side

    @property
    def needs_a_response(self) -> bool:
        """Whether one of the answers is the index of a choice, so that the request must name its response."""
        return isinstance(self.chosen, int) or isinstance(self.rejected, int)


class FeedbackRequest(Model):
    """Body of `POST /v1/feedback`.

    The fields `session_id`, `msg_ids` or `response_id` name its target; without these `task_id`, or the answers in
    `preference`. `headrace_schemas.events.opinion` checks which fields may be combined.
    """

    session_id: Id | None = None
    msg_ids: tuple[Id, ...] = Field(default=(), max_length=TARGETS_MAX)
    response_id: Id | None = None
    """Abbreviation of `msg_ids` with one element."""
    level: Level | None = None
    choice: ChoiceIndex | None = None
    value: Value = None
    rating: Number | None = None
    scale: tuple[Number, Number] | None = None
    label: Id | None = None
    parts: dict[Metric, Number] = Field(default_factory=dict, max_length=32)
    edit: Annotated[Message | None, BeforeValidator(_answer)] = None
    preference: PreferenceRequest | None = None
    metric: Metric | None = None
    rater: Id | None = None
    source: Id = "feedback"
    task_id: Id | None = None
    run_id: Id | None = None
    comment: LongText | None = None
    context: Annotated[dict[Text, JsonValue], Field(max_length=CONTEXT_KEYS_MAX), JSON_BOUNDS] = Field(
        default_factory=dict
    )
    ends_session: bool = False
    withdrawn: bool = False
    kind: Kind | None = None
    """Kind of the feedback that is withdrawn; by default a value, or a preference if one is named."""
    feedback_id: Id | None = None
    """Id by which the client's retries are recognized: requests with equal ids count as one feedback."""

    @model_validator(mode="after")
    def _one_response_where_one_is_meant(self) -> Self:
        """Check the number of responses that the feedback names, because an edit, a choice and a preference need a
        fixed number."""
        is_single = len(self._named) == 1
        check_values(self.level, len(self._named), len(self.parts))
        if self.preference is None:
            if (self.edit is not None or self.kind == "edit") and not is_single:
                raise rule_error("edit", "must name exactly one response; name it as response_id")
            if (self.choice is not None or self.level == "response") and not is_single:
                field = "level" if self.choice is None else "choice"
                raise rule_error(field, "must name exactly one response; name it as response_id")
        elif self.preference.needs_a_response and not is_single:
            raise rule_error("preference", "compares choices of one response; name it as response_id")
        elif not self.preference.needs_a_response and self._named:
            raise rule_error("preference", "names its responses itself; leave response_id and msg_ids out")
        return self

    @model_validator(mode="after")
    def _check_target_and_content(self) -> Self:
        if not (self.session_id or self.targets or self.level == "task"):
            raise ValueError("session_id, msg_ids or response_id must name the target of the feedback")
        if self.withdrawn and self.value is not None:
            raise ValueError("a withdrawn feedback has no value")
        forms = (self.value, self.rating, self.label, self.edit, self.preference)
        names = () if self.level == "task" else (self.task_id, self.run_id, self.ends_session)  # a task has its name
        facts = (self.comment, self.context, self.withdrawn, self.parts, *names)
        if all(form is None for form in forms) and not any(facts):
            raise ValueError("the feedback is empty; send a value, withdrawn, ends_session, context, task_id or run_id")
        return self

    @property
    def is_value(self) -> bool:
        """Whether the feedback sends or withdraws a value, or has only a comment or facts. False for an edit and a
        preference."""
        return self.edit is None and self.preference is None and self.kind in (None, "value")

    @property
    def compared(self) -> Preference | None:
        """Preference of this feedback with the response ids of both answers, or None without a preference."""
        both = self.preference
        if both is None:
            return None
        return Preference(chosen=self._compared(both.chosen), rejected=self._compared(both.rejected))

    def _compared(self, side: int | str | AnswerOfResponse) -> ComparedAnswer:
        if isinstance(side, AnswerOfResponse):
            return ComparedAnswer(turn_id=side.response_id, choice=side.choice)
        if isinstance(side, str):
            return ComparedAnswer(turn_id=side)
        (response,) = self._named  # `_one_response_where_one_is_meant` has looked
        return ComparedAnswer(turn_id=response, choice=side)

    @property
    def _named(self) -> tuple[str, ...]:
        return self.msg_ids + ((self.response_id,) if self.response_id else ())

    @property
    def targets(self) -> tuple[str, ...]:
        """Ids of the responses that the feedback is about."""
        preference = self.compared
        return self._named if preference is None else tuple(answer.turn_id for answer in preference.pair)


class TrinityFeedback(Model):
    """Body of `POST /feedback`, as the clients of Trinity-RFT and AgentScope send it.

    These clients send no further fields, and no reader would use one, so any other field is refused.
    """

    msg_ids: tuple[Id, ...] = Field(max_length=TARGETS_MAX)
    reward: Number
    task_id: Id | None = None
    run_id: Id | None = None


def _no_commit_of_one(value: Any) -> None:
    if value is not None:
        raise ValueError("a commit ends all runs; leave the id out, or end one session with POST /v1/sessions/{id}/end")


class TrinityCommit(Model):
    """Body of `POST /commit`, which ends each open run of the tenant that began before `time_threshold`.

    Clients send the ids as null. Other ids are refused, because a commit cannot end single runs.
    """

    task_id: Annotated[None, BeforeValidator(_no_commit_of_one)] = None
    run_id: Annotated[None, BeforeValidator(_no_commit_of_one)] = None
    time_threshold: float | Text | None = None

    @property
    def before(self) -> datetime | None:
        """`time_threshold` as a time in UTC, or None. Raises `ValueError` if it is not a time."""
        threshold = self.time_threshold
        if threshold is None:
            return None
        if isinstance(threshold, str):
            parsed = datetime.fromisoformat(threshold)
            return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).astimezone(UTC)
        return datetime.fromtimestamp(threshold / 1000 if threshold >= _EPOCH_MS_FROM else threshold, UTC)
