"""Text from outside, as a message may show it and as UTF-8 and PostgreSQL can store it."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable
from itertools import islice

LENGTH_MAX = 200
"""Characters of one text from outside in a message."""
_MARK_ROOM = 48
"""Characters of the longest mark that states how much was cut, rounded up."""
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Control and format characters (bidi controls, zero-width), surrogates, private use, unassigned, line separators."""
_BLANK_LETTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
"""Letters and marks that Unicode assigns and fonts draw without ink."""
_COMPARED_LENGTH_MAX = 64
_COMPARED_MAX = 200
"""Comparing two names takes time in the product of their lengths."""
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def printable(text: str, length_max: int = LENGTH_MAX) -> str:
    r"""Return `text` on one line, without characters that steer a terminal or hide from a reader, cut to `length_max`.

    Such characters become `\n`, `\r`, `\t`, `\xNN`, `\uNNNN` or `\UNNNNNNNN`. A longer text ends with a mark that says
    how many of its characters were cut; the mark counts towards `length_max`. The function reads at most `length_max`
    characters, and applying it to its own result changes nothing.

    Raises:
        ValueError: `length_max` leaves no room for the mark.
    """
    if length_max < _MARK_ROOM:
        raise ValueError(f"length_max = {length_max}: must be at least {_MARK_ROOM}, so that the mark of a cut fits")
    if len(text) <= length_max and text.isascii() and text.isprintable():
        return text
    return _cut([_visible(character) for character in text[: length_max + 1]], len(text), length_max)


def printable_lines(text: str, length_max: int) -> str:
    """Return `text` as `printable` does, with its line breaks and tabs: for text of several lines on its own."""
    kept = text[:length_max].replace("\r\n", "\n")
    shown = "\n".join(_visible_line(line) for line in kept.split("\n"))
    if len(text) <= length_max:
        return shown
    return f"{shown}... ({len(text) - length_max} more characters)"


def closest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate that a reader may have meant by `name`; None when no candidate is similar.

    Long names have none, and only the first 200 candidates are compared.
    """
    if len(name) > _COMPARED_LENGTH_MAX:
        return None
    compared = [candidate for candidate in islice(candidates, _COMPARED_MAX) if len(candidate) <= _COMPARED_LENGTH_MAX]
    return next(iter(difflib.get_close_matches(name, compared, n=1, cutoff=cutoff)), None)


def storable(text: str) -> str:
    """Return `text` with NUL and lone surrogates replaced by U+FFFD; UTF-8 and PostgreSQL can hold all others."""
    return _UNSTORABLE.sub("\ufffd", text)


def is_storable(text: str) -> bool:
    """Return whether UTF-8 and PostgreSQL can hold `text`: it has neither NUL nor lone surrogates."""
    return _UNSTORABLE.search(text) is None


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
    """Join `pieces`, one per character of a text of `length` characters, and cut between pieces if they do not fit."""
    shown = "".join(pieces)
    if len(pieces) == length and len(shown) <= length_max:
        return shown
    room = length_max - _MARK_ROOM
    kept = used = 0
    while used + len(pieces[kept]) <= room:
        used += len(pieces[kept])
        kept += 1
    return f"{shown[:used]}... ({length - kept} more characters)"
