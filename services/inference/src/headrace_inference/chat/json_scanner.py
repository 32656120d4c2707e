"""Incremental scanning of a growing text: the end of a JSON object, without converting values, and markers in text that
arrives in pieces.

The scanner neither recurses nor parses numbers, so it does not limit depth or digits. Each call continues where the
last one stopped. The grammar is that of RFC 8259.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_SPACE = re.compile(r"[ \t\r\n]*")
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_BARE = re.compile(r"[-+.0-9A-Za-z]*")
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}


class MalformedJson(ValueError):
    """Error: the text does not begin with a JSON object, whatever follows it."""


@dataclass(slots=True)
class ObjectScanner:
    """Scanner of the JSON object that begins at `start` of a text, which may grow between calls of `scan`."""

    start: int = 0
    end: int | None = None
    """Position after the object; None until it is complete."""
    members: list[tuple[slice, slice]] = field(default_factory=list)
    """Positions of the object's own keys and values in the text, in order."""
    _at: int = -1
    _open: list[str] = field(default_factory=list)
    _expected: str = "object"
    _key: slice | None = None
    _value_start: int = 0
    _string_start: int = -1

    def scan(self, text: str) -> bool:
        """Continue the scan, and return whether the object is complete. Raises `MalformedJson`."""
        if self._at < 0:
            self._at = self.start
        while self.end is None:
            if self._string_start < 0:
                self._at = _SPACE.match(text, self._at).end()  # type: ignore[union-attr]
            if self._at == len(text):
                return False
            if not self._step(text):
                return False
        return True

    def _step(self, text: str) -> bool:
        """Scan the next JSON token at the current position. Return False if more text is needed."""
        if self._string_start >= 0:
            return self._string(text)
        character = text[self._at]
        if self._expected == "colon":
            return self._punctuation(character, ":", "value")
        if self._expected == "comma":
            return self._close(character) if character in "}]" else self._punctuation(character, ",", self._after_comma)
        if character in "}]" and self._expected in ("first key", "first item"):
            return self._close(character)
        if self._expected in ("first key", "key"):
            return self._begin_string(character)
        return self._value(text, character)

    @property
    def _after_comma(self) -> str:
        return "key" if self._open[-1] == "{" else "value"

    def _value(self, text: str, character: str) -> bool:
        if len(self._open) == 1:
            self._value_start = self._at
        if character == "{" or (character == "[" and self._expected != "object"):
            self._open.append(character)
            self._expected = "first key" if character == "{" else "first item"
            self._at += 1
            return True
        if self._expected == "object":
            raise MalformedJson
        if character == '"':
            return self._begin_string(character)
        end = _BARE.match(text, self._at).end()  # type: ignore[union-attr]
        if end == len(text):
            return False  # the next character may belong to it
        if _LITERAL.fullmatch(text, self._at, end) is None:
            raise MalformedJson
        self._at = end
        self._value_ends()
        return True

    def _begin_string(self, character: str) -> bool:
        if character != '"':
            raise MalformedJson
        self._string_start = self._at
        self._at += 1
        return True

    def _string(self, text: str) -> bool:
        self._at = _CHARACTERS.match(text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(text) or _OPEN_ESCAPE.fullmatch(text, self._at) is not None:
            return False
        if text[self._at] != '"':
            raise MalformedJson
        self._at += 1
        begin, self._string_start = self._string_start, -1
        if self._expected in ("first key", "key"):
            if len(self._open) == 1:
                self._key = slice(begin, self._at)
            self._expected = "colon"
        else:
            self._value_ends()
        return True

    def _punctuation(self, character: str, required: str, expected_next: str) -> bool:
        if character != required:
            raise MalformedJson
        self._at += 1
        self._expected = expected_next
        return True

    def _close(self, character: str) -> bool:
        if character != _CLOSING[self._open.pop()]:
            raise MalformedJson
        self._at += 1
        if self._open:
            self._value_ends()
        else:
            self.end = self._at
        return True

    def _value_ends(self) -> None:
        self._expected = "comma"
        if len(self._open) == 1 and self._key is not None:
            self.members.append((self._key, slice(self._value_start, self._at)))
            self._key = None


def partial_marker_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of one of `markers`."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    at = text.find(mark[0], max(len(text) - len(mark) + 1, 0))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0


class StopStrings:
    """Filter of streamed text that ends at the first stop string, which it then stores as `complete`."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._begun = [0] * len(stops)
        """For each stop string, the length of its longest beginning that the text ends with."""
        self._buffer = ""
        self.complete: str | None = None

    def feed(self, text: str) -> str:
        """Add the next piece of text, and return the text that can no longer be part of a stop string."""
        if not self._stops:
            return text
        if self.complete is not None:
            return ""
        for number, stop in enumerate(self._stops):
            self._begun[number] = _begun_length(stop, self._begun[number], text)
        text = self._buffer + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self.complete = text[start:end]
            self._buffer = ""
            return text[:start]
        certain = len(text) - max(self._begun)
        self._buffer = text[certain:]
        return text[:certain]

    def end(self) -> str:
        """Return the buffered text, which did not become a stop string."""
        text, self._buffer = self._buffer, ""
        return text


def _begun_length(stop: str, begun: int, text: str) -> int:
    """Return the length of the longest prefix of `stop` with which a growing text ends after `text` was appended.

    It uses the automaton of Knuth, Morris and Pratt (SIAM J. Comput. 6 (1977) 323), because comparing all prefixes for
    each token takes milliseconds with long stop strings.

    Args:
        stop: the stop string.
        begun: that length before `text` was appended.
        text: the appended text.
    """
    if len(text) >= len(stop):  # only the end matters
        text, begun = text[len(text) - len(stop) + 1 :], 0
    borders = _borders(stop)
    for character in text:
        while begun and (begun == len(stop) or stop[begun] != character):
            begun = borders[begun]
        begun += stop[begun] == character
    return begun


@lru_cache(maxsize=1024)
def _borders(stop: str) -> tuple[int, ...]:
    """Return the failure function of Knuth, Morris and Pratt for the search of `stop`: for each prefix length, the
    length of the longest proper suffix of that prefix that is also a prefix of `stop`.
    """
    borders = [0, 0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length]
        borders.append(length + (stop[length] == character))
    return tuple(borders)
