"""Field types of token ids and logprobs, which are JSON arrays or packed little-endian base64 in events.

Both forms are accepted, and the packed form is written. In memory the values are tuples. Logprobs are rounded to
float32 when they are read, so that writing a value again gives the same bytes.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from headrace_schemas.values.bounds import LOGPROB_MIN

MAX_LENGTH = 1_048_576
"""Maximum length of an array in an event. It exceeds the context of every existing model and bounds memory."""

_ROUNDING = 1e-4
"""Largest logprob above zero that is accepted as a float32 rounding error."""


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
