"""Whether an answer is right, and whether it has the form that was asked for."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Sequence

from headrace_schemas.linear_pattern import fits_whole

Expected = str | float | Sequence[str | float]
"""The right answer, or several of which each is right."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?<=\d)(?!\d|\.\d)")
_FRACTION = re.compile(r"(?<![\w.])([-+]?\d+)\s*/\s*(\d+)(?![\w/])")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """As SQuAD compares answers: NFKC, lower case, no punctuation, no English articles, single spaces."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = "".join(" " if letter in string.punctuation else letter for letter in plain)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def numbers_in(text: str) -> list[float]:
    """Every number of a text in order: `1,234.5`, `-2e3`, `3/4`, `12%` as 12."""
    plain = unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-")
    fractions = [match for match in _FRACTION.finditer(plain) if int(match[2])]
    found = [(match.start(), int(match[1]) / int(match[2])) for match in fractions]
    covered = [match.span() for match in fractions]
    for match in _NUMBER.finditer(plain):
        inside = any(start <= match.start() < stop for start, stop in covered)
        if not inside:
            found.append((match.start(), float(match[0].replace(",", ""))))
    return [value for _, value in sorted(found) if math.isfinite(value)]


def accuracy(answer: str, expected: Expected, *, tolerance: float = 1e-6) -> float:
    """1 for a right answer, else 0.

    An expected number is compared with the last number of the answer, which is where an answer that shows its work has
    its result. `tolerance` is relative where the number is over 1, else absolute. An expected text has to be the whole
    answer, after `normalized`: an answer that lists all that could be right is not right.
    """
    if isinstance(expected, str | int | float):
        return float(_is(answer, expected, tolerance))
    return float(any(_is(answer, one, tolerance) for one in expected))


def _is(answer: str, expected: str | float, tolerance: float) -> bool:
    if isinstance(expected, bool):
        return normalized(answer) in (("true", "yes") if expected else ("false", "no"))
    if isinstance(expected, str):
        wanted = normalized(expected)
        return normalized(answer) == wanted if wanted else answer.strip() == expected.strip()
    found = numbers_in(answer)
    return bool(found) and abs(found[-1] - expected) <= tolerance * max(1.0, abs(expected))


def follows(answer: str, pattern: str | re.Pattern[str]) -> float:
    """Return 1 when the whole answer fits the regular expression, else 0. `.` also stands for line breaks.

    A text as `pattern` may come from anywhere, and is matched in linear time, without look-around and back-references.
    A compiled `re.Pattern` is the author's own, and is matched by Python with the flags that it has.

    Raises:
        ValueError: `pattern` cannot be matched in linear time; see `headrace_schemas.linear_pattern`.
    """
    if isinstance(pattern, re.Pattern):
        return float(pattern.fullmatch(answer.strip()) is not None)
    return float(fits_whole(answer.strip(), pattern))
