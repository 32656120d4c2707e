"""Matching of external regular expressions in time linear in the length of the text.

Python's `re` backtracks, so that one expression can block a process for hours. This module uses the automaton of Rust's
`regex`, which is part of pydantic. It supports neither look-around nor back-references. Its time is proportional to the
length of the text times the length of the expression with its counted repetitions expanded, and this product is
bounded.
"""

from __future__ import annotations

import re
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from headrace_schemas.values.text import printable, storable

PATTERN_LENGTH_MAX = 1_000
_STATES_MAX = 2_000
_WORK_MAX = 10_000_000
"""Maximum product of states and bytes of the text. It takes under half a second on one core."""
_COUNT = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")
_IN_CLASS = {"[": r"\[", "&": r"\&", "~": r"\~"}
"""Characters that are literals inside `[...]` in Python and set operators in Rust."""


def matches_whole_text(text: str, pattern: str) -> bool:
    """Return whether `pattern` matches the whole `text`. `.` also matches line breaks.

    Raises:
        ValueError: `pattern` cannot be matched in linear time, or is too long for `text`.
    """
    matcher, states = _compile(pattern)
    encodable = storable(text)
    length = len(encodable.encode())
    if states * length > _WORK_MAX:
        raise ValueError(
            f"regular expression {_quote(pattern)}: its {states} states are too many for a text of {length} bytes; "
            "use fewer or smaller counted repetitions"
        )
    try:
        matcher.validate_python(encodable, strict=True)
    except ValidationError:
        return False
    return True


@lru_cache(maxsize=64)
def _compile(pattern: str) -> tuple[SchemaValidator, int]:
    if len(pattern) > PATTERN_LENGTH_MAX:
        raise ValueError(
            f"regular expression {_quote(pattern)}: it has more than {PATTERN_LENGTH_MAX} characters; shorten it"
        )
    translated, states = _Translation(pattern).run()
    if states > _STATES_MAX:
        raise ValueError(
            f"regular expression {_quote(pattern)}: its counted repetitions expand to {states} states; at most "
            f"{_STATES_MAX} are allowed"
        )
    try:
        schema = core_schema.str_schema(pattern=rf"\A(?s:{translated})\z", regex_engine="rust-regex")
        return SchemaValidator(schema), states
    except SchemaError as error:
        reason = str(error).rsplit("error:", 1)[-1].strip()
        raise ValueError(
            f"regular expression {_quote(pattern)}: {printable(reason)}; look-around, back-references and possessive "
            "quantifiers are not supported"
        ) from None


def _quote(pattern: str) -> str:
    return f"'{printable(pattern, 120)}'"


class _Translation:
    """Translation of one pattern from Python's to Rust's syntax, which also measures its length.

    The length is that of the pattern with its counted repetitions expanded.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._pieces: list[str] = []
        self._sizes: list[int] = [0]
        """Lengths of the open groups, the outermost first."""
        self._last = 0
        """Length of the item that a quantifier at this position would repeat."""

    def run(self) -> tuple[str, int]:
        """Return the translated pattern and its length."""
        at = 0
        while at < len(self._pattern):
            at = self._step(at)
        return "".join(self._pieces), sum(self._sizes)

    def _step(self, at: int) -> int:
        """Translate the item of the pattern at position `at` to Rust's syntax, and return the position after the item.

        An item is a character, an escape, a character class, a parenthesis or a quantifier.
        """
        pattern, character = self._pattern, self._pattern[at]
        if character == "\\":
            escape = pattern[at : at + 2]
            self._item(r"\z" if escape == r"\Z" else escape)
            return at + 2
        if character == "[":
            return self._character_class(at)
        if character == "{" and (count := _COUNT.match(pattern, at)) and count[0] != "{}" and count[0] != "{,}":
            return self._repeat(count)
        if character == "(":
            self._sizes.append(0)
            self._pieces.append(character)
        elif character == ")" and len(self._sizes) > 1:
            self._last = self._sizes.pop() + 1
            self._sizes[-1] += self._last
            self._pieces.append(character)
        elif character in "*+?":
            if character == "+" and self._pieces and self._pieces[-1][0] in "*+?{":
                raise ValueError(f"regular expression {_quote(pattern)}: possessive quantifiers are not supported")
            self._pieces.append(character)
        else:
            self._item(r"\{" if character == "{" else r"\}" if character == "}" else character)
        return at + 1

    def _item(self, text: str) -> None:
        self._last = 1
        self._sizes[-1] += 1
        self._pieces.append(text)

    def _character_class(self, at: int) -> int:
        end = at + 1
        if self._pattern[end : end + 1] == "^":
            end += 1
        pieces = [self._pattern[at:end]]
        start = end
        while end < len(self._pattern) and (self._pattern[end] != "]" or end == start):
            width = 2 if self._pattern[end] == "\\" else 1
            pieces.append(_IN_CLASS.get(self._pattern[end], self._pattern[end : end + width]))
            end += width
        self._item("".join(pieces) + self._pattern[end : end + 1])
        return end + 1

    def _repeat(self, count: re.Match[str]) -> int:
        least, comma, most = count.groups()
        self._pieces.append(f"{{{least or 0}{comma}{most}}}")
        times = int(most or least or 1)
        self._sizes[-1] += self._last * (max(times, 1) - 1)
        self._last *= max(times, 1)
        return count.end()
