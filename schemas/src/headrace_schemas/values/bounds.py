"""Bounds of the values in events, shared by HTTP endpoints and stream consumers.

The validators leave the released JSON Schema of a field unchanged, because a schema with a new limit would break
compatibility (`headrace_schemas.generate`). So the limits are in this module and in the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, ValidationInfo
from pydantic_core import PydanticCustomError

from headrace_schemas.values.text import is_storable, storable

SCORE_MAX = 1e6
"""Largest absolute value of one source: of rewards, ratings, ends of scales, parts and criteria."""
WEIGHT_MAX = 1e6
"""Largest weight of a source."""
TOTAL_MAX = 1e15
"""Largest absolute value of a combined reward: the sum of 64 scores at `SCORE_MAX`, each with `WEIGHT_MAX`, fits."""
SAMPLING_MIN = 1e-6
"""Smallest `top_p`, and smallest temperature of a trained span. Smaller numbers do not fit float32."""
SAMPLING_MAX = 1e6
"""Largest temperature of a span."""
LOGPROB_MIN = -1e4
"""Lowest logprob of a sampled token; engines write -9999 for a probability of 0."""
INT32_MAX, INT64_MAX, UINT64_MAX = 2**31 - 1, 2**63 - 1, 2**64 - 1
JSON_DEPTH_MAX = 64
"""Maximum depth of objects and lists in free JSON, such as `context` or a tool's parameters."""
JSON_VALUES_MAX = 32_768
"""Maximum number of values in free JSON, without the names of fields."""
JSON_CHARACTERS_MAX = 1_048_576
"""Maximum number of characters in the strings and field names of free JSON together."""
STORED = "stored"
"""Key of the pydantic validation context for events that are read from Headrace's own database."""
SAMPLED = "sampled"
"""Key of the pydantic validation context for events with text that a model may have sampled (`Event.sampled_text`)."""
PROMPT_MESSAGES_MAX = 8191
"""Maximum number of messages of one call. With the answer they fit one dialogue."""
CONTEXT_KEYS_MAX = 64
"""Maximum number of names in one context, also after several contexts were merged."""


def _refusal(kind: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("bound", "{problem}", {"problem": problem, "kind": kind})


def is_stored(info: ValidationInfo) -> bool:
    """Return whether the value comes from Headrace's own database, where an older release may have stored it."""
    return bool(info.context and info.context.get(STORED))


def check_text(value: str, info: ValidationInfo) -> str:
    """Return `value`; replace characters that cannot be stored if it comes from Headrace's own database.

    Raises:
        PydanticCustomError: a new value contains such characters.
    """
    if is_storable(value):
        return value
    if is_stored(info):
        return storable(value)
    raise _text_refusal()


def check_sampled_text(value: str, info: ValidationInfo) -> str:
    """Return `value` as `check_text` does, but replace the characters also in a record of a topic with sampled text.

    A model may sample NUL, and earlier releases recorded it. The token ids, which training reads, are not affected.

    Raises:
        PydanticCustomError: a new value contains such characters.
    """
    if info.context and info.context.get(SAMPLED):
        return storable(value)
    return check_text(value, info)


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
"""A number of one source, at most `SCORE_MAX`."""

Total = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_check_total)]
"""A number that is computed from several scores and weights, at most `TOTAL_MAX`."""

INT32, INT64 = AfterValidator(_check_int32), AfterValidator(_check_int64)
"""Validators of integers that databases store in 32 and in 64 bits. In `Annotated` they must follow `Field`."""

SAMPLING = AfterValidator(_check_sampling)
"""Validator of a number that engines and trainers convert to float32, at least `SAMPLING_MIN`."""

Int64 = Annotated[int, INT64]
"""An integer that databases store in 64 bits."""


def check_json(value: object) -> None:
    """Check parsed free JSON against the bounds of this module.

    Each level is checked in bulk: a body of many small objects costs a tenth of what a check of each value would.

    Raises:
        PydanticCustomError: the JSON exceeds a bound.
    """
    level: Sequence[object] = (value,)
    values = depth = 1
    characters = 0
    while level:
        _check_plain(level)
        rest = [item for item in level if type(item) not in _PLAIN]
        texts = [item for item in rest if isinstance(item, str)]
        nested = [item for item in rest if not isinstance(item, str)]
        mappings = [item for item in nested if isinstance(item, Mapping)]
        lists = [item for item in nested if isinstance(item, list | tuple)]
        values += sum(map(len, mappings)) + sum(map(len, lists))
        if values > JSON_VALUES_MAX:
            raise _refusal("json", f"must hold at most {JSON_VALUES_MAX} values")
        characters += _length("".join(chain(texts, chain.from_iterable(mappings))))
        if characters > JSON_CHARACTERS_MAX:
            raise _refusal("json", f"must hold at most {JSON_CHARACTERS_MAX} characters of text and names")
        level = [*chain.from_iterable(mapping.values() for mapping in mappings), *chain.from_iterable(lists)]
        depth += 1
        if level and depth > JSON_DEPTH_MAX:
            raise _refusal("json", f"must have at most {JSON_DEPTH_MAX} levels of objects and lists")


_PLAIN = frozenset({int, float, bool, NoneType})
"""Types of JSON values that are checked in bulk. Long lists of numbers are common, and checking each number separately
takes twenty times as long."""


def _check_plain(values: Collection[object]) -> None:
    """Raise a pydantic error if a number among `values` is not finite or is an integer of over 64 bits."""
    if not all(map(math.isfinite, [value for value in values if type(value) is float])):
        raise _refusal("number", "must hold finite numbers only; JSON has no NaN and no infinity")
    integers = [value for value in values if type(value) is int]
    if integers and not -INT64_MAX - 1 <= min(integers) <= max(integers) <= UINT64_MAX:
        raise _refusal("number", "must hold whole numbers of at most 64 bits; send longer ones as text")


def _length(text: str) -> int:
    if not is_storable(text):
        raise _text_refusal()
    return len(text)


def _check_json(value: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
    if is_stored(info):
        return {storable(name): _clean(inner) for name, inner in value.items()}
    check_json(value)
    return value


JSON_BOUNDS = AfterValidator(_check_json)
"""Validator of a JSON object, for fields that are not a `JsonObject`."""


def _clean(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    if isinstance(value, dict):
        return {storable(name): _clean(inner) for name, inner in value.items()}
    return value


JsonObject = Annotated[dict[str, JsonValue], JSON_BOUNDS]
"""A JSON object within the bounds of this module. It is passed on unchanged."""


def merge_contexts(contexts: Iterable[Mapping[str, JsonValue]]) -> dict[str, JsonValue]:
    """Merge several contexts into one that fits an event.

    The last value of a name replaces earlier ones. If the result has too many names, values or characters for one
    `JsonObject`, the oldest names are left out.
    """
    merged: dict[str, JsonValue] = {}
    for context in contexts:
        for name in context:
            merged.pop(name, None)  # so that the names are in the order of their newest values
        merged |= context
    newest_names: list[str] = []
    values, characters = 1, 0
    for name in reversed(merged):
        more_values, more_characters = _size_of(merged[name])
        values, characters = values + more_values, characters + more_characters + len(name)
        if len(newest_names) == CONTEXT_KEYS_MAX or values > JSON_VALUES_MAX or characters > JSON_CHARACTERS_MAX:
            break
        newest_names.append(name)
    return {name: merged[name] for name in reversed(newest_names)}


def _size_of(value: JsonValue) -> tuple[int, int]:
    """Return the number of values and the number of characters in `value`, as `check_json` counts them."""
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
