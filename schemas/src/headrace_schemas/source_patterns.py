"""Patterns for names of sources. `*` matches any text; all other characters match themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache


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
