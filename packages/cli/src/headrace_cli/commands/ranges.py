"""The options that choose a range of a topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.times import parse_time

if TYPE_CHECKING:
    from headrace.topics import Range

PANEL = "Which records"


@dataclass(frozen=True)
class RangeOptions:
    """What of a topic is wanted, as it stands on the command line."""

    since: Annotated[
        str | None, typer.Option(help="From this time on: ISO 8601, or 90s, 5min, 2h, 7d ago.", rich_help_panel=PANEL)
    ] = None
    until: Annotated[str | None, typer.Option(help="Up to this time, exclusive.", rich_help_panel=PANEL)] = None
    from_offset: Annotated[
        int | None, typer.Option(min=0, help="From this offset of each partition on.", rich_help_panel=PANEL)
    ] = None
    to_offset: Annotated[
        int | None, typer.Option(min=0, help="Up to this offset, exclusive.", rich_help_panel=PANEL)
    ] = None
    partition: Annotated[
        list[int] | None, typer.Option(help="Only this partition; may be repeated.", rich_help_panel=PANEL)
    ] = None
    session: Annotated[
        list[str] | None, typer.Option(help="Only this session; may be repeated.", metavar="ID", rich_help_panel=PANEL)
    ] = None
    tenant: Annotated[str, typer.Option(help="Whose sessions they are.", rich_help_panel=PANEL)] = "default"

    def of(self, topic: str) -> Range:
        """Raises `UsageError` for what is no time."""
        from headrace.topics import Range
        from headrace_schemas.ids import session_key

        return Range(
            topic,
            partitions=tuple(self.partition or ()),
            from_offset=self.from_offset,
            to_offset=self.to_offset,
            since=parse_time(self.since),
            until=parse_time(self.until),
            keys=frozenset(session_key(self.tenant, one) for one in self.session or ()),
        )
