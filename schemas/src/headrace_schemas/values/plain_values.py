"""Conversion of numbers and errors from users' programs into plain Python values.

No array library is imported. A scalar of numpy, torch, JAX or pandas is recognised by its empty shape and its `item()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Real

from headrace_schemas.values.text import storable

ERROR_LENGTH_MAX = 2000
_TIMES = ("m", "M")
"""Kinds of numpy's data types for durations and dates, whose scalars may hold integers."""


def plain_number(value: object) -> float:
    """Convert a number from a user's program into a float.

    Supported are `bool`, `int`, `float`, `Decimal`, `Fraction` and other real numbers, and scalars of array libraries
    (`numpy.bool_`, arrays and tensors without dimensions).

    Raises:
        TypeError: `value` is not a single real number. Strings are refused, too.
        ValueError: the number is masked, not finite, or too large for a float.
    """
    shape = getattr(value, "shape", None)
    if shape is not None and callable(item := getattr(value, "item", None)):
        return _scalar(value, shape, item)
    if not isinstance(value, Real | Decimal):
        raise TypeError(f"{_kind(value)} is not a number; return a number")
    return _finite(value)


def plain_value(value: object) -> object:
    """Convert scalars of array libraries and decimal numbers into Python numbers; return all other values unchanged.

    Booleans stay booleans, integers stay integers.
    """
    shape, item = getattr(value, "shape", None), getattr(value, "item", None)
    if shape is not None and callable(item):
        number, scalar = plain_number(value), item()
        return scalar if type(scalar) in (bool, int) else number
    return plain_number(value) if isinstance(value, Decimal | Fraction) else value


def plain_json(value: object) -> object:
    """Convert mappings, sequences and numbers of any library for `json.dumps`; return other values unchanged."""
    value = plain_value(value)
    if isinstance(value, Mapping):
        return {str(name): plain_json(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain_json(inner) for inner in value]
    return value


def stop_strings(value: object) -> object:
    """Return the field `stop` of a request as a tuple, or None for an empty string or list."""
    if isinstance(value, str):
        return (value,) if value else None
    return (tuple(value) or None) if isinstance(value, list | tuple) else value


def none_if_empty(value: object) -> object:
    """Return None for an empty string and all other values unchanged."""
    return None if value == "" else value


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error from a user's program, cut to `ERROR_LENGTH_MAX` and storable.

    The user's code produces the text. If that code fails, a placeholder replaces the text.
    """
    try:
        text = str(error)
    except BaseException as problem:  # noqa: BLE001 (`__str__` may raise anything)
        text = f"(its text cannot be read: {_kind(problem)})"
    name = _kind(error)
    if len(text) > ERROR_LENGTH_MAX:
        text = f"{text[:ERROR_LENGTH_MAX]}... ({len(text) - ERROR_LENGTH_MAX} more characters)"
    return storable(f"{name}: {text}" if text else name)


def _scalar(value: object, shape: object, item: Callable[[], object]) -> float:
    try:
        dimensions: tuple[object, ...] = tuple(shape)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{_kind(value)} is not a number; return a number") from None
    if dimensions:
        raise TypeError(f"{_kind(value)} has the shape {dimensions}; return a single number, for example its mean")
    if _is_true(getattr(value, "mask", False)):
        raise ValueError(f"{_kind(value)} is masked; return None to abstain")
    if getattr(getattr(value, "dtype", None), "kind", "") in _TIMES:
        raise TypeError(f"{_kind(value)} is a time; return a number")
    number = item()
    if not isinstance(number, Real | Decimal):
        raise TypeError(f"{_kind(value)} holds {_kind(number)}, which is not a number; return a number")
    return _finite(number)


def _finite(value: Real | Decimal) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("the number is too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def _is_true(value: object) -> bool:
    try:
        return bool(value)
    except (TypeError, ValueError):
        return True


def _kind(value: object) -> str:
    return type(value).__name__[:100]
