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
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
