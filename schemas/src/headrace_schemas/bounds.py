"""Bounds of what events can hold, shared by HTTP doors and stream consumers.

Validators here keep the JSON Schema of a field as it was released: a schema with a new limit would be another contract
(`headrace_schemas.compatibility`), so the limits stand in this module and in the documentation of the doors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from types import NoneType
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, ValidationInfo
from pydantic_core import PydanticCustomError

from headrace_schemas.text import is_storable, storable

SCORE_MAX = 1e6
"""Largest absolute value that one source may give: rewards, ratings, ends of scales, parts, criteria."""
WEIGHT_MAX = 1e6
"""Largest weight of a source."""
TOTAL_MAX = 1e15
"""Largest absolute value of a combined reward: the sum of 64 scores at `SCORE_MAX`, each with `WEIGHT_MAX`, fits."""
SAMPLING_MIN = 1e-6
"""Smallest `top_p`, and smallest temperature of a span that is trained: smaller numbers leave float32."""
SAMPLING_MAX = 1e6
"""Largest temperature of a span."""
LOGPROB_MIN = -1e4
"""Lowest logprob of a sampled token; engines write -9999 for a probability of 0."""
INT32_MAX, INT64_MAX, UINT64_MAX = 2**31 - 1, 2**63 - 1, 2**64 - 1
JSON_DEPTH_MAX = 64
"""Most levels of objects and lists in free JSON, such as `context` or a tool's parameters."""
JSON_VALUES_MAX = 32_768
"""Most values in free JSON, names of fields not counted."""
JSON_CHARACTERS_MAX = 1_048_576
"""Most characters in the strings and names of free JSON together."""
STORED = "stored"
"""Key of the validation context of events that are read from our own database."""
PROMPT_MESSAGES_MAX = 8191
"""Most messages of one call: with the answer they fit a dialogue."""
CONTEXT_KEYS_MAX = 64
"""Most names in one context, also where the contexts of several feedbacks become one."""


def _refusal(kind: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("bound", "{problem}", {"problem": problem, "kind": kind})


def is_stored(info: ValidationInfo) -> bool:
    """Return whether the value comes from our own database, where an older release may have stored it."""
    return bool(info.context and info.context.get(STORED))


def check_text(value: str, info: ValidationInfo) -> str:
    """Return `value`, cleaned where it was stored before. Raise a pydantic error if nothing can hold it."""
    if is_storable(value):
        return value
    if is_stored(info):
        return storable(value)
    raise _text_refusal()


def _text_refusal() -> PydanticCustomError:
    return _refusal("text", "must not contain NUL or lone surrogates; remove these characters")


def _check_size(value: float, largest: float) -> float:
    if not -largest <= value <= largest:
        raise _refusal("number", f"must be a number between {-largest:g} and {largest:g}; rescale it")
    return value


def _check_score(value: float) -> float:
    return _check_size(value, SCORE_MAX)


def _check_total(value: float) -> float:
    return _check_size(value, TOTAL_MAX)


def _check_int32(value: int) -> int:
    if not -INT32_MAX <= value <= INT32_MAX:
        raise _refusal("number", f"must be a whole number between -{INT32_MAX} and {INT32_MAX}")
    return value


def _check_int64(value: int) -> int:
    if not -INT64_MAX <= value <= INT64_MAX:
        raise _refusal("number", f"must be a whole number between -{INT64_MAX} and {INT64_MAX}")
    return value


def _check_sampling(value: float) -> float:
    if not SAMPLING_MIN <= value <= SAMPLING_MAX:
        raise _refusal("number", f"must be between {SAMPLING_MIN:g} and {SAMPLING_MAX:g}, well within float32")
    return value


Score = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_check_score)]
"""A number that one source gives: see `SCORE_MAX`."""

Total = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_check_total)]
"""A number that follows from several scores and weights: see `TOTAL_MAX`."""

INT32, INT64 = AfterValidator(_check_int32), AfterValidator(_check_int64)
"""Numbers and counts that databases keep in 32 bits, and in 64 bits. They stand after `Field`."""

SAMPLING = AfterValidator(_check_sampling)
"""A number that engines and trainers read as float32: see `SAMPLING_MIN`."""

Int64 = Annotated[int, INT64]
"""A whole number that databases keep in 64 bits."""


def check_json(value: object) -> None:
    """Raise a pydantic error if free JSON breaks a bound of this module. The values must be parsed JSON."""
    todo = [(value, 1)]
    values = characters = 0
    while todo:
        item, depth = todo.pop()
        values += 1
        inside = len(item) if isinstance(item, Mapping | list | tuple) else 0
        if values + len(todo) + inside > JSON_VALUES_MAX:
            raise _refusal("json", f"must hold at most {JSON_VALUES_MAX} values")
        match item:
            case str():
                characters += _length(item)
            case int() | float():
                _check_plain((item,))
            case Mapping():
                characters += sum(map(_length, item))
                todo += [(inner, depth + 1) for inner in item.values()]
            case list() | tuple():
                others = [inner for inner in item if type(inner) not in _PLAIN]
                _check_plain(item)
                values += inside - len(others)
                todo += [(inner, depth + 1) for inner in others]
                if inside and depth == JSON_DEPTH_MAX:
                    depth += 1
        if depth > JSON_DEPTH_MAX:
            raise _refusal("json", f"must have at most {JSON_DEPTH_MAX} levels of objects and lists")
        if characters > JSON_CHARACTERS_MAX:
            raise _refusal("json", f"must hold at most {JSON_CHARACTERS_MAX} characters of text and names")


_PLAIN = frozenset({int, float, bool, NoneType})
"""Types of JSON values that are checked many at a time: long lists of numbers are common, and checking each alone takes
twenty times as long."""


def _check_plain(values: Collection[object]) -> None:
    """Raise a pydantic error for a number among `values` that is not finite, or a whole one beyond 64 bits."""
    if not all(map(math.isfinite, [value for value in values if type(value) is float])):
        raise _refusal("number", "must hold finite numbers only; JSON has no NaN and no infinity")
    whole = [value for value in values if type(value) is int]
    if whole and not -INT64_MAX - 1 <= min(whole) <= max(whole) <= UINT64_MAX:
        raise _refusal("number", "must hold whole numbers of at most 64 bits; send longer ones as text")


def _length(text: str) -> int:
    if not is_storable(text):
        raise _text_refusal()
    return len(text)


def _checked(value: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
    if is_stored(info):
        return {storable(name): _cleaned(inner) for name, inner in value.items()}
    check_json(value)
    return value


JSON_BOUNDS = AfterValidator(_checked)
"""Bounds of a JSON object, for a field with a type of its own."""


def _cleaned(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, list):
        return [_cleaned(inner) for inner in value]
    if isinstance(value, dict):
        return {storable(name): _cleaned(inner) for name, inner in value.items()}
    return value


JsonObject = Annotated[dict[str, JsonValue], JSON_BOUNDS]
"""A JSON object that is passed on as it came, within the bounds of this module."""


def merge_contexts(contexts: Iterable[Mapping[str, JsonValue]]) -> dict[str, JsonValue]:
    """Return the facts of several contexts as one that every event can hold.

    Of equal names the last value counts. When there are too many names, values or characters for one `JsonObject`, the
    names that were given first are left out.
    """
    merged: dict[str, JsonValue] = {}
    for context in contexts:
        for name in context:
            merged.pop(name, None)  # so that the names stand in the order of their newest value
        merged |= context
    kept: list[str] = []
    values, characters = 1, 0
    for name in reversed(merged):
        more_values, more_characters = _size_of(merged[name])
        values, characters = values + more_values, characters + more_characters + len(name)
        if len(kept) == CONTEXT_KEYS_MAX or values > JSON_VALUES_MAX or characters > JSON_CHARACTERS_MAX:
            break
        kept.append(name)
    return {name: merged[name] for name in reversed(kept)}


def _size_of(value: JsonValue) -> tuple[int, int]:
    """Return the number of values and of characters, as `check_json` counts them."""
    todo: list[JsonValue] = [value]
    values = characters = 0
    while todo:
        item = todo.pop()
        values += 1
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, dict):
            characters += sum(map(len, item))
            todo += item.values()
        elif isinstance(item, list):
            todo += item
    return values, characters
