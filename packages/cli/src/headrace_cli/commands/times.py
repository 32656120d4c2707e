"""Times on the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}


def parse_time(text: str | None) -> datetime | None:
    """ISO 8601, in UTC unless it says otherwise, or how long ago. Raises `UsageError`."""
    from headrace.errors import UsageError

    if text is None:
        return None
    ago = _AGO.fullmatch(text)
    if ago:
        return datetime.now(UTC) - timedelta(seconds=float(ago[1]) * _SECONDS[ago[2]])
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is no time; write 2026-01-31T12:00:00Z, or 90s, 5min, 2h, 7d for ago") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
