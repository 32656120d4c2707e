"""Names of reward sources: those that only one service may use, and patterns, in which `*` matches any text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache

RESERVED: dict[str, str] = {"function": "scorer", "learned": "scorer", "judge": "judge"}
"""Service by the first word of the sources (before the colon) that are reserved for it."""
FROM_FEEDBACK = "feedback"
"""First word of the default source of feedback. The scorer computes its rewards from the feedback."""

_COLONS = ":\u02d0\u02f8\u0589\u05c3\u0703\u0704\u16ec\u1803\u1809\u205a\u2236\ua789\ufe30"
"""The colon and characters that look like it."""
_LOOKALIKES = {
    "a": "\u0430\u0251\u03b1",
    "c": "\u0441\u03f2\u1d04",
    "d": "\u0501\u1d05",
    "e": "3\u0435\u0454\u03b5\u1d07",
    "f": "\u0192",
    "g": "\u0261\u0581",
    "i": "\u0456\u0131\u03b9",
    "j": "\u0458\u03f3\u1d0a",
    "l": "1|\u04cf\u01c0",
    "n": "\u0578\u043f\u03b7\u0438",
    "o": "0\u043e\u03bf\u0585\u1d0f",
    "r": "\u0433\u1d26",
    "t": "\u0442\u03c4",
    "u": "\u057d\u03c5\u1d1c",
}
"""Digits and Cyrillic, Greek, Armenian and Latin letters that look like a letter of the reserved words."""
_PLAIN = str.maketrans({alike: letter for letter, lookalikes in _LOOKALIKES.items() for alike in lookalikes})


def owner_of(source: str) -> str | None:
    """Return the service for which `source` and its metrics are reserved, or None if every producer may use them."""
    return RESERVED.get(_split(source)[0])


def giver_of(source: str) -> str | None:
    """Return the service that sends the rewards of `source`, or None if external producers send them.

    Services send the rewards of reserved sources. The scorer sends those of `feedback` and its metrics.
    """
    word = _split(source)[0]
    return "scorer" if word == FROM_FEEDBACK else RESERVED.get(word)


def refusal_of(name: str, *, whole_word: bool = True) -> str | None:
    """Return the reason why callers must not use `name`, or None if they may.

    Args:
        name: the name of a source, a rater or a metric.
        whole_word: whether to refuse a reserved word without a colon, too. A source needs it, because a metric is
            appended to it after a colon.
    """
    word, has_colon = _split(name)
    if word not in RESERVED or not (whole_word or has_colon):
        return None
    words = ", ".join(sorted(RESERVED))
    return f"is reserved for the {RESERVED[word]}; use another name that begins with none of {words}"


def _split(source: str) -> tuple[str, bool]:
    """Return the word before the first colon, in plain lower-case letters, and whether there is a colon."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", source.translate(_PLAIN)).casefold())
    at = next((at for at, character in enumerate(folded) if character in _COLONS), len(folded))
    visible = (character for character in folded[:at] if unicodedata.category(character)[0] not in "CMZ")
    return "".join(visible).translate(_PLAIN), at < len(folded)


def fits(pattern: str, source: str) -> bool:
    """Return whether `source` matches `pattern`."""
    return _compiled(pattern).fullmatch(source) is not None


def fits_any(patterns: Iterable[str], source: str) -> bool:
    """Return whether `source` matches at least one of the patterns."""
    return any(fits(pattern, source) for pattern in patterns)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(_expression(pattern), re.DOTALL)


def _expression(pattern: str) -> str:
    """Translate `pattern` into a regular expression that does not backtrack, as `fnmatch` does."""
    first, *parts = map(re.escape, pattern.split("*"))
    if not parts:
        return first
    *middle, last = parts
    return first + "".join(f"(?>.*?{text})" for text in middle if text) + f".*{last}"
