"""Generator of valid and nearly valid JSON: numbers at their edges, lists at their limits, every kind of text.

`mutate` changes a valid JSON document in one to three places and returns the bytes of the result, which may no longer
be valid JSON.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

LENGTHS = (
    0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 8191,
    8192, 16_385,
)  # fmt: skip
"""Lengths at and just beyond the limits of lists, dictionaries and texts."""
_VALUES_MAX = 50_000
"""Maximum number of values that one change adds: a list of long lists would only measure how fast JSON is written."""

NUMBERS = (
    "0", "-0.0", "-1", "1", "0.5", "1e-39", "1e-320", "-1e-320", "5e-324", "1e6", "1000001", "-1e6", "1e16", "255",
    "256", "3.4028234663852886e38", "3.4028235677973366e38", "-3.5e38", "1.8e308", "-1.8e308", "1.7e308", "-1.7e308",
    "1e999",
    "2147483647", "2147483648", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "-9223372036854775809", "1" + "0" * 400, "NaN", "Infinity", "-Infinity", "1.0", "0.1e1",
)  # fmt: skip
"""Numbers as JSON text, so that numbers that Python would round are sent unchanged."""

TEXTS = (
    "", " ", "\x00", "a\x00b", "\ud83d", "\ude00", "\ude00\ud83d", "bad \ud83d end", "\x1b[31mred\x1b]0;title\x07",
    "\x9b2J", "\x7f", "\u202egnp.exe", "\u2066x\u2069", "\u200b", "\u2028", "\ufeff", "\ufffe", "e\u0301", "\u00fc",
    "judge:helpfulness", "function:answer", "Judge:helpfulness", "../../etc/passwd", "%00", "%ud83d", "null", "NaN",
    "<|im_end|>", "<extra_1>", "</tool_call>", "<tool_call>{", '{"', "a-" * 9000, "a" * 18_000, "password=" * 2000,
    "x@" * 4000, "(" * 5000, "\\" * 9000, "a." * 9000, "://:" * 4000, " \t\n" * 3000, "0" * 5000, "\U0001f600" * 600,
)  # fmt: skip

_MARK = re.compile('"raw-([0-9]+)-number"')

_Place = tuple[Any, Any]
"""A place in the document: a container, and the key of one of its values."""


class Raw(str):
    """JSON text of a number, which is written without quotes."""


def mutate(document: object, rng: random.Random) -> bytes:
    """Return the JSON of `document` with one to three hostile changes; sometimes damage the bytes or change nothing."""
    changed: Any = {"": copy.deepcopy(document)}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        paths = list(_paths(changed))
        container, key = rng.choice(paths)
        change = rng.choice(_changes_of(container[key]))
        change(container, key, rng)
    return _damaged(to_bytes(changed.get("")), rng)


def to_bytes(document: object) -> bytes:
    """Encode `document` as JSON. `Raw` texts become numbers, lone surrogates become escapes."""
    numbers: list[str] = []

    def replaced(value: object) -> object:
        match value:
            case Raw():
                numbers.append(value)
                return f"raw-{len(numbers) - 1}-number"
            case dict():
                return {str(key): replaced(item) for key, item in value.items()}
            case list() | tuple():
                return [replaced(item) for item in value]
            case _:
                return value

    text = json.dumps(replaced(document))
    return _MARK.sub(lambda mark: numbers[int(mark[1])], text).encode()


def _paths(container: Any) -> Iterator[_Place]:
    keys = list(container) if isinstance(container, dict) else range(min(len(container), 4))
    for key in keys:
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _paths(container[key])


def _set_number(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = Raw(rng.choice(NUMBERS))


def _set_text(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = rng.choice(TEXTS) if rng.random() < 0.7 else "a" * rng.choice(LENGTHS)


def _extend_text(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = rng.choice(((container[key] + rng.choice(TEXTS)), (rng.choice(TEXTS) + container[key])))


def _swap_type(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = rng.choice((None, True, False, [], {}, "1", Raw("1.5"), [[]], {"a": None}, [None]))


def _remove(container: Any, key: Any, _rng: random.Random) -> None:
    if isinstance(container, dict) and key != "":
        del container[key]


def _resize_list(container: Any, key: Any, rng: random.Random) -> None:
    values, length = container[key], _length(rng)
    first = values[0] if values else rng.choice(("x", Raw("1"), {"a": Raw("1")}))
    length = min(length, _VALUES_MAX // _count(first))
    container[key] = [_variant(first, number) for number in range(length)]


def _grow_dict(container: Any, key: Any, rng: random.Random) -> None:
    values = container[key]
    sample = next(iter(values.values()), rng.choice(("x", Raw("1"))))
    for number in range(min(_length(rng), _VALUES_MAX // _count(sample))):
        values[f"{rng.choice(('key', 'm', '€'))}{number}"] = _variant(sample, number)


def _length(rng: random.Random) -> int:
    """Draw one of `LENGTHS`. Long lengths are rarer, since generating them would take most of the time of a run."""
    length = rng.choice(LENGTHS)
    return rng.choice(LENGTHS) if length > 1025 and rng.random() < 0.7 else length


def _count(value: Any) -> int:
    """Return the number of JSON values in `value`, including itself."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count, inner))


def _add_key(container: Any, key: Any, rng: random.Random) -> None:
    container[key][rng.choice(TEXTS)] = rng.choice(("x", Raw(rng.choice(NUMBERS)), rng.choice(TEXTS), []))


def _deepen(container: Any, key: Any, rng: random.Random) -> None:
    value = container[key]
    for _ in range(rng.choice((2, 16, 60, 120))):
        value = {"a": value} if rng.random() < 0.5 else [value]
    container[key] = value


_Change = Callable[[Any, Any, random.Random], None]
_ANY: tuple[_Change, ...] = (_swap_type, _remove, _deepen)


def _changes_of(value: object) -> tuple[_Change, ...]:
    match value:
        case bool() | None:
            return (_set_number, _set_text, *_ANY)
        case Raw() | int() | float():
            return (_set_number, _set_number, _set_number, _set_number, _set_text, *_ANY)
        case str():
            return (_set_text, _set_text, _set_text, _extend_text, _extend_text, _set_number, *_ANY)
        case list():
            return (_resize_list, _resize_list, _resize_list, *_ANY)
        case dict():
            return (_grow_dict, _grow_dict, _add_key, _add_key, *_ANY)
    return _ANY


def _variant(value: Any, number: int) -> Any:
    """Return a copy of `value` whose texts contain `number`, so that copies with different numbers differ."""
    if value is None or isinstance(value, Raw | int | float):
        return value
    if isinstance(value, str):
        return f"{value[:40]}{number}"
    if isinstance(value, dict):
        return {key: _variant(item, number) for key, item in value.items()}
    return copy.deepcopy(value)


def _damaged(body: bytes, rng: random.Random) -> bytes:
    if rng.random() > 0.06 or not body:
        return body
    at = rng.randrange(len(body))
    match rng.randrange(6):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
        case 2:
            return b"\xef\xbb\xbf" + body
        case 3:
            return body.decode().encode("utf-16")
        case 4:
            return body[:at] + b"\xff\xfe" + body[at:]
        case _:
            return body + body
