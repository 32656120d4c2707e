"""Options that select a range of a topic, and the times that they take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.topics import Range


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


PANEL = "Records"


@dataclass(frozen=True)
class RangeOptions:
    """Range of a topic on the command line."""

    since: Annotated[
        str | None,
        typer.Option(help="Oldest record: ISO 8601, or an age such as 90s, 5min, 2h, 7d.", rich_help_panel=PANEL),
    ] = None
    until: Annotated[str | None, typer.Option(help="End time, exclusive.", rich_help_panel=PANEL)] = None
    from_offset: Annotated[
        int | None, typer.Option(min=0, help="First offset of each partition.", rich_help_panel=PANEL)
    ] = None
    to_offset: Annotated[
        int | None, typer.Option(min=0, help="End offset of each partition, exclusive.", rich_help_panel=PANEL)
    ] = None
    partition: Annotated[
        list[int] | None, typer.Option(help="Select this partition; may be repeated.", rich_help_panel=PANEL)
    ] = None
    session: Annotated[
        list[str] | None,
        typer.Option(help="Select this session; may be repeated.", metavar="ID", rich_help_panel=PANEL),
    ] = None
    tenant: Annotated[str, typer.Option(help="Tenant of the sessions.", rich_help_panel=PANEL)] = "default"

    def range_of(self, topic: str) -> Range:
        """Return the records of `topic` that the options select.

        Raises:
            UsageError: `since` or `until` is not a time.
        """
        from headrace.topics import Range
        from headrace_schemas.values.ids import session_key

        return Range(
            topic,
            partitions=tuple(self.partition or ()),
            from_offset=self.from_offset,
            to_offset=self.to_offset,
            since=parse_time(self.since),
            until=parse_time(self.until),
            keys=frozenset(session_key(self.tenant, session) for session in self.session or ()),
        )
