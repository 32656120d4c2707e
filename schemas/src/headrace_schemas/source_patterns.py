"""Patterns for names of sources: `*` stands for anything, everything else for itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache


def fits(pattern: str, source: str) -> bool:
    return _compiled(pattern).fullmatch(source) is not None


def fits_any(patterns: Iterable[str], source: str) -> bool:
    return any(fits(pattern, source) for pattern in patterns)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(_expression(pattern), re.DOTALL)


def _expression(pattern: str) -> str:
    """Return a regular expression that never tries a `*` again once the text after it was matched, as in `fnmatch`."""
    first, *others = map(re.escape, pattern.split("*"))
    if not others:
        return first
    *middle, last = others
    return first + "".join(f"(?>.*?{text})" for text in middle if text) + f".*{last}"
