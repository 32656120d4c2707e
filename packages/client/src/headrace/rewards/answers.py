"""Rewards for an answer: whether it is right, whether it has the requested format, its length and its steps."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Sequence

from headrace_schemas.values.linear_pattern import fits_whole

Expected = str | float | Sequence[str | float]
"""The right answer, or several right answers."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?<=\d)(?!\d|\.\d)")
_FRACTION = re.compile(r"(?<![\w.])([-+]?\d+)\s*/\s*(\d+)(?![\w/])")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """Normalize a text as SQuAD does: NFKC, lower case, no punctuation, no English articles, single spaces."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = "".join(" " if letter in string.punctuation else letter for letter in plain)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a text in order: `1,234.5`, `-2e3`, `3/4`, and `12%` as 12."""
    plain = unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-")
    fractions = [match for match in _FRACTION.finditer(plain) if int(match[2])]
    numbers = [(match.start(), int(match[1]) / int(match[2])) for match in fractions]
    covered = [match.span() for match in fractions]
    for match in _NUMBER.finditer(plain):
        inside = any(start <= match.start() < stop for start, stop in covered)
        if not inside:
            numbers.append((match.start(), float(match[0].replace(",", ""))))
    return [value for _, value in sorted(numbers) if math.isfinite(value)]


def accuracy(answer: str, expected: Expected, *, tolerance: float = 1e-6) -> float:
    """Return 1 for a right answer, else 0.

    An expected number is compared with the last number of the answer, because an answer that shows its work ends with
    its result. An expected text must be the whole answer after `normalized`, so that a list of all possible answers is
    wrong.

    Args:
        tolerance: relative for expected numbers above 1, else absolute.
    """
    if isinstance(expected, str | int | float):
        return float(_is_right(answer, expected, tolerance))
    return float(any(_is_right(answer, alternative, tolerance) for alternative in expected))


def _is_right(answer: str, expected: str | float, tolerance: float) -> bool:
    if isinstance(expected, bool):
        return normalized(answer) in (("true", "yes") if expected else ("false", "no"))
    if isinstance(expected, str):
        normalized_expected = normalized(expected)
        return normalized(answer) == normalized_expected if normalized_expected else answer.strip() == expected.strip()
    numbers = numbers_in(answer)
    return bool(numbers) and abs(numbers[-1] - expected) <= tolerance * max(1.0, abs(expected))


def follows(answer: str, pattern: str | re.Pattern[str]) -> float:
    """Return 1 if the whole answer matches a regular expression, else 0. `.` also matches line breaks.

    Args:
        pattern: a string may come from any source and is matched in linear time, without look-around and
            back-references. A compiled `re.Pattern` is trusted, and Python matches it with its flags.

    Raises:
        ValueError: `pattern` cannot be matched in linear time; see `headrace_schemas.values.linear_pattern`.
    """
    if isinstance(pattern, re.Pattern):
        return float(pattern.fullmatch(answer.strip()) is not None)
    return float(fits_whole(answer.strip(), pattern))


_STEP = re.compile(r"^[ \t]*(?:(?:step\s*)?\d+[.):]|[-*\u2022])[ \t]+(\S.*)$", re.IGNORECASE | re.MULTILINE)


def length_penalty(reward: float, length: int, *, length_max: int = 1024, weight: float = 0.001) -> float:
    """Return the reward minus `weight` times the relative excess of `length` over `length_max`.

    The penalty never makes a reward negative, and a negative reward is unchanged.
    """
    over = max(0, length - length_max) / length_max
    return max(min(reward, 0.0), reward - weight * over)


def steps(reward: float, answer: str, *, bonus: float = 0.1, most: float = 0.5) -> float:
    """Return the reward plus `bonus` for each different step that the answer lists, up to `most` in total.

    Only a positive reward gets the bonus. Otherwise a model would learn to write steps instead of right answers.
    """
    if reward <= 0:
        return reward
    written = {step.strip().casefold() for step in _STEP.findall(answer)}
    return reward + min(bonus * len(written), most)
