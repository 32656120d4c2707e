"""Cleaning of external text for messages and storage, and conversion of numbers and errors of users' programs.

No array library is imported. A scalar of numpy, torch, JAX or pandas is recognised by its empty shape and its `item()`.
"""

from __future__ import annotations

import codecs
import difflib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from numbers import Real
from pathlib import Path

LENGTH_MAX = 200
"""Maximum number of characters of one external text in a message."""
_MARK_LENGTH_MAX = 48
"""Upper bound of the length of the mark that states how many characters were cut."""
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Control and format characters (bidi controls, zero-width), surrogates, private use, unassigned, line separators."""
_BLANK_LETTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
"""Letters and marks that fonts render as blank."""
_COMPARED_LENGTH_MAX = 64
_COMPARED_MAX = 200
"""Limits of `closest`. Comparing two names takes time in the product of their lengths."""
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_SURROGATES = re.compile("[\ud800-\udfff]")
ERROR_LENGTH_MAX = 2000
_TIMES = ("m", "M")
"""Kinds of numpy's data types for durations and dates, whose scalars may hold integers."""


def printable(text: str, length_max: int = LENGTH_MAX) -> str:
    r"""Return `text` on one line, without characters that steer a terminal or hide from a reader, cut to `length_max`.

    Such characters become `\n`, `\r`, `\t`, `\xNN`, `\uNNNN` or `\UNNNNNNNN`. A longer text ends with a mark that
    states how many characters were cut; the mark counts towards `length_max`. The function reads at most `length_max`
    characters, and it is idempotent.

    Raises:
        ValueError: `length_max` is shorter than the mark.
    """
    if length_max < _MARK_LENGTH_MAX:
        raise ValueError(
            f"length_max = {length_max}: must be at least {_MARK_LENGTH_MAX}, so that the mark of a cut fits"
        )
    if len(text) <= length_max and text.isascii() and text.isprintable():
        return text
    return _cut([_visible(character) for character in text[: length_max + 1]], len(text), length_max)


def printable_lines(text: str, length_max: int) -> str:
    """Return `text` as `printable` does, but with its line breaks and tabs."""
    head = text[:length_max].replace("\r\n", "\n")
    printable_head = "\n".join(_visible_line(line) for line in head.split("\n"))
    if len(text) <= length_max:
        return printable_head
    return f"{printable_head}... ({len(text) - length_max} more characters)"


def closest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate that is most similar to `name`, or None if no candidate is similar.

    Names of over 64 characters are never similar, and only the first 200 candidates are compared.
    """
    if len(name) > _COMPARED_LENGTH_MAX:
        return None
    compared = [candidate for candidate in islice(candidates, _COMPARED_MAX) if len(candidate) <= _COMPARED_LENGTH_MAX]
    return next(iter(difflib.get_close_matches(name, compared, n=1, cutoff=cutoff)), None)


def storable(text: str) -> str:
    """Replace NUL and lone surrogates, which UTF-8 and PostgreSQL cannot store, by U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


def is_storable(text: str) -> bool:
    """Return whether UTF-8 and PostgreSQL can store `text`, which then has neither NUL nor lone surrogates."""
    return _UNSTORABLE.search(text) is None


def has_surrogates(text: str) -> bool:
    """Return whether `text` has lone surrogates, which UTF-8 cannot encode."""
    return not text.isascii() and _SURROGATES.search(text) is not None


def _visible_line(line: str) -> str:
    if line.isascii() and line.isprintable():
        return line
    return "".join(character if character == "\t" else _visible(character) for character in line)


def _visible(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    if unicodedata.category(character) not in _HIDDEN_CATEGORIES and character not in _BLANK_LETTERS:
        return character
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _cut(pieces: list[str], length: int, length_max: int) -> str:
    """Join `pieces`, and cut the result between two pieces if it exceeds `length_max`.

    Args:
        pieces: the printable form of each of the first characters of the text.
        length: the number of characters of the text.
        length_max: the maximum length of the result.
    """
    joined = "".join(pieces)
    if len(pieces) == length and len(joined) <= length_max:
        return joined
    cut_at = length_max - _MARK_LENGTH_MAX
    count = end = 0
    while end + len(pieces[count]) <= cut_at:
        end += len(pieces[count])
        count += 1
    return f"{joined[:end]}... ({length - count} more characters)"


_PROBED_BYTES = 200
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode_text(content: bytes, line: int = 1) -> str:
    """Decode the content of a file in UTF-8, with or without a byte order mark.

    Args:
        content: the content of the file, or a part of it.
        line: the number of the first line in `content`, for the message.

    Raises:
        ValueError: the content has another encoding. The message is a sentence without its subject, the file.
    """
    if is_utf_16(content):
        raise ValueError("is in UTF-16; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = line + content.count(b"\n", 0, error.start)
        raise ValueError(
            f"is not in UTF-8 (byte 0x{content[error.start]:02x} in line {number}; Latin-1 perhaps); save it as UTF-8"
        ) from None


def is_utf_16(content: bytes) -> bool:
    """Return whether `content` seems to be UTF-16, with or without a byte order mark."""
    return content.startswith(_UTF_16) or b"\x00" in content[:_PROBED_BYTES]


def read_user_text(path: Path) -> str:
    """Read a text file that a person wrote, and convert its line ends to `\\n`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not in UTF-8, as in `decode_text`.
    """
    return decode_text(path.read_bytes()).replace("\r\n", "\n")


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
    """Return the name of the type of `value`, which the code of a metaclass cannot change."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name[:100]
