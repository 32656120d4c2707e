"""Base classes and field types of all events. Constructing an event refuses unknown fields, parsing one ignores them.

Both forms are accepted, and the packed form is written. In memory the values are tuples. Logprobs are rounded to
float32 when they are read, so that writing a value again gives the same bytes.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails

from headrace_schemas.values.bounds import LOGPROB_MIN, SAMPLED, STORED, check_sampled_text, check_text
from headrace_schemas.values.errors import InvalidEvent

Text = Annotated[str, StringConstraints(min_length=1, max_length=512), AfterValidator(check_text)]
"""A short identifier or label, without NUL and lone surrogates."""

LongText = Annotated[str, StringConstraints(max_length=1_048_576), AfterValidator(check_text)]
"""Text that a person or a model wrote, without NUL and lone surrogates."""

SampledText = Annotated[str, StringConstraints(max_length=1_048_576), AfterValidator(check_sampled_text)]
"""Text of a dialogue, which a model may have sampled, without NUL and lone surrogates."""

Remark = Annotated[str, StringConstraints(max_length=4096), AfterValidator(check_text)]
"""An operator's comment on a change, without NUL and lone surrogates."""

SessionKey = Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{16}$")]
"""A partition key as `headrace_schemas.values.ids.session_key` computes it."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

Version = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9a-f]{12,64}$")]
"""The name of an immutable version of a model: `name@digest`."""

ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]

Share = Annotated[str, StringConstraints(pattern=r"^(0|1|[1-9][0-9]{0,8}/[1-9][0-9]{0,8})$")]
"""An exact fraction such as `1/100`. Floats are not used because their sums are not exact."""

AliasName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""An alias, a label or a tag of a version."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
MAX_LENGTH = 1_048_576
"""Maximum length of an array in an event. It exceeds the context of every existing model and bounds memory."""

_ROUNDING = 1e-4
"""Largest logprob above zero that is accepted as a float32 rounding error."""


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("is before the year 1 or after the year 9999 in UTC") from None


Timestamp = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""An instant, kept in UTC."""


_PROBLEMS_MAX = 5
"""Maximum number of problems of one invalid value in a message."""


def utcnow() -> datetime:
    return datetime.now(UTC)


class Model(BaseModel):
    """Immutable pydantic model that refuses unknown fields. Only `Event.from_json`, which parses events of newer
    producers, ignores them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Event(Model):
    """One fact on one topic. The record's value is the event as JSON; its metadata are CloudEvents headers.

    A subclass defines `topic` and `type`, and implements `event_id` and `key`. Equal facts have equal event ids, so
    consumers deduplicate by them. Events with equal keys are in one partition, in the order in which they were sent.
    """

    topic: ClassVar[str]
    type: ClassVar[str]
    values_max: ClassVar[int] = 262_144
    """Maximum number of JSON values in one event of an external producer. It bounds the cost of parsing."""
    containers_max: ClassVar[int] = 16_384
    """Maximum number of objects and lists among these values."""
    sampled_text: ClassVar[bool] = False
    """Whether the event contains `SampledText`, in which `from_json` replaces NUL instead of refusing the event."""

    time: Timestamp
    """The time of the fact, by the clock of its producer."""

    @property
    def event_id(self) -> str:
        raise NotImplementedError

    @property
    def key(self) -> str:
        raise NotImplementedError

    @property
    def subject(self) -> str:
        """The CloudEvents subject (`ce_subject`). It is the key unless a subclass overrides it."""
        return self.key

    def to_json(self) -> bytes:
        """Return the event as JSON in UTF-8, without nulls and with packed arrays."""
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Self:
        """Parse the value of a record. Unknown fields are ignored at every depth.

        Raises:
            InvalidEvent: the value is invalid. The message names the fields but no values, which may be user text.
        """
        return cls._read(value, {SAMPLED: cls.sampled_text})

    @classmethod
    def from_stored(cls, value: bytes) -> Self:
        """Parse a value from Headrace's own database and replace characters that only older releases accepted.

        Raises:
            InvalidEvent: the value breaks another rule.
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
    """Return the first problems of `error` with their fields but without values, which may be user text."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(map(_problem_text, problems[:_PROBLEMS_MAX]))


def _problem_text(problem: ErrorDetails) -> str:
    """Return the path of the invalid field and the reason. The message of a `feedback_rule` contains its field."""
    path = ".".join(map(str, problem["loc"]))
    return problem["msg"] if problem["type"] == "feedback_rule" else f"{path or 'value'}: {problem['msg']}"


def pack_int32(values: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}i", *values)).decode()


def pack_float32(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _unpack(text: str, code: str) -> tuple[Any, ...]:
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None
    if len(raw) % 4:
        raise ValueError(f"{len(raw)} bytes: the length must be a multiple of 4")
    return struct.unpack(f"<{len(raw) // 4}{code}", raw)


def _read_ids(value: Any) -> Any:
    return _unpack(value, "i") if isinstance(value, str) else value


def _read_floats(value: Any) -> Any:
    if isinstance(value, str):
        return _unpack(value, "f")
    if isinstance(value, Sequence) and all(isinstance(item, int | float) for item in value):
        try:
            return struct.unpack(f"<{len(value)}f", struct.pack(f"<{len(value)}f", *value))
        except (OverflowError, struct.error):  # a double, or an integer beyond a double
            raise ValueError("a value does not fit float32") from None
    return value


def _array_schema(items: dict[str, Any], media_type: str) -> dict[str, Any]:
    return {
        "anyOf": [
            {"type": "array", "items": items, "maxItems": MAX_LENGTH},
            {"type": "string", "contentEncoding": "base64", "contentMediaType": media_type},
        ]
    }


TokenIds = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
    Field(max_length=MAX_LENGTH),
    BeforeValidator(_read_ids),
    PlainSerializer(pack_int32, return_type=str, when_used="json"),
    WithJsonSchema(_array_schema({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "application/x-int32-le")),
]
"""Token ids as int32."""

_LOGPROBS_SCHEMA = _array_schema({"type": "number", "maximum": _ROUNDING}, "application/x-float32-le")

Logprobs = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False, le=_ROUNDING)], ...],
    Field(max_length=MAX_LENGTH),
    BeforeValidator(_read_floats),
    PlainSerializer(pack_float32, return_type=str, when_used="json"),
    WithJsonSchema(_LOGPROBS_SCHEMA),
]
"""Logprobs of any tokens as float32, in nats, after the temperature was applied."""

SampledLogprobs = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False, ge=LOGPROB_MIN, le=_ROUNDING)], ...],
    Field(max_length=MAX_LENGTH),
    BeforeValidator(_read_floats),
    PlainSerializer(pack_float32, return_type=str, when_used="json"),
    WithJsonSchema(_LOGPROBS_SCHEMA),
]
"""Logprobs of sampled tokens as float32, in nats, after the temperature was applied; none is below `LOGPROB_MIN`."""
