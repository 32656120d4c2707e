"""What every event has: strict when we build it, tolerant when we read it, an id, a key, a time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from headrace_schemas.bounds import STORED, check_text
from headrace_schemas.errors import InvalidEvent

Text = Annotated[str, StringConstraints(min_length=1, max_length=512), AfterValidator(check_text)]
"""A short identifier or label, without NUL and lone surrogates."""

LongText = Annotated[str, StringConstraints(max_length=1_048_576), AfterValidator(check_text)]
"""Something that a person or a model wrote, without NUL and lone surrogates."""

Remark = Annotated[str, StringConstraints(max_length=4096), AfterValidator(check_text)]
"""What an operator writes beside a change, without NUL and lone surrogates."""

SessionKey = Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{16}$")]
"""See `headrace_schemas.ids.session_key`."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

Version = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9a-f]{12,64}$")]
"""Immutable weights: `name@digest`."""

ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]

Share = Annotated[str, StringConstraints(pattern=r"^(0|1|[1-9][0-9]{0,8}/[1-9][0-9]{0,8})$")]
"""An exact part of a whole, `1/100`; as a float it would not add up."""

AliasName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""An alias, a label or a tag of a version."""

Finite = Annotated[float, Field(allow_inf_nan=False)]


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("is before the year 1 or after the year 9999 in UTC") from None


Timestamp = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""An instant, kept in UTC."""


_PROBLEMS_MAX = 5
"""Problems of one invalid value that a message names."""


def utcnow() -> datetime:
    return datetime.now(UTC)


class Model(BaseModel):
    """A frozen value. Unknown fields are refused here; `Event.from_json` lets a newer producer's fields pass."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Event(Model):
    """One fact on one topic. The value on the wire is its bare JSON; the rest travels in CloudEvents headers.

    Subclasses name their `topic` and `type` and implement `event_id` (equal for equal facts: consumers dedupe by it)
    and `key` (equal keys share a partition and keep their order).
    """

    topic: ClassVar[str]
    type: ClassVar[str]
    values_max: ClassVar[int] = 262_144
    """Most values in the JSON of one event from other producers than Headrace's own: parsing costs that much."""
    containers_max: ClassVar[int] = 16_384
    """Most objects and lists among these values."""

    time: Timestamp
    """When the fact came to be, by its producer's clock."""

    @property
    def event_id(self) -> str:
        raise NotImplementedError

    @property
    def key(self) -> str:
        raise NotImplementedError

    @property
    def subject(self) -> str:
        """What the event is about (`ce_subject`); the key unless a subclass knows better."""
        return self.key

    def to_json(self) -> bytes:
        """Bare JSON in UTF-8, without nulls; arrays packed."""
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Self:
        """Read a value from the wire. Unknown fields pass, at every depth.

        Raises `InvalidEvent`, with the offending fields named but never their values (they may be user text).
        """
        return cls._read(value, {})

    @classmethod
    def from_stored(cls, value: bytes) -> Self:
        """Read a value from a database of our own, where an older release may have stored text that is refused today.

        Such characters are replaced. Raises `InvalidEvent` for everything else that breaks a rule of today.
        """
        return cls._read(value, {STORED: True})

    @classmethod
    def _read(cls, value: bytes, context: dict[str, bool]) -> Self:
        try:
            return cls.model_validate_json(value, extra="ignore", context=context)
        except ValidationError as error:
            kind = error.errors(include_input=False, include_url=False, include_context=False)[0]["type"]
            reason = "invalid_json" if kind == "json_invalid" else "invalid_event"
            raise InvalidEvent(reason, f"{cls.type}: {problems_of(error)}") from None


def problems_of(error: ValidationError) -> str:
    """Return the first problems of `error` with their fields, never with values: they may be somebody's text."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(map(_problem_text, problems[:_PROBLEMS_MAX]))


def _problem_text(problem: ErrorDetails) -> str:
    """Return the field at fault and the reason. A rule about several fields names the field itself."""
    where = ".".join(map(str, problem["loc"]))
    return problem["msg"] if problem["type"] == "feedback_rule" else f"{where or 'value'}: {problem['msg']}"
