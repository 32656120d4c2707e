"""Parsing of times on the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}


def parse_time(text: str | None) -> datetime | None:
    """Parse an ISO 8601 time, in UTC by default, or an age such as 2h.

    Raises:
        UsageError: the text is neither.
    """
    from headrace.errors import UsageError

    if text is None:
        return None
    age = _AGE.fullmatch(text)
    if age:
        return datetime.now(UTC) - timedelta(seconds=float(age[1]) * _SECONDS[age[2]])
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is not a time; use the form 2026-01-31T12:00:00Z, or an age such as 90s, 5min, 2h, 7d"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
