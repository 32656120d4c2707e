"""`headrace dead-letters`: list, show, retry and discard what services refused."""

from __future__ import annotations

import heapq
import json as jsonlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace_cli.commands import dead_letters_printed as printed
from headrace_cli.commands.shared import AsJson, BusOptions, Commands, command, echo_json, progress, topic_names
from headrace_cli.commands.times import parse_time

if TYPE_CHECKING:
    from headrace_operations.dead_letters import Letter, Plan, Selection
    from headrace_operations.dead_letters.reading import Cut, State


Ids = Annotated[list[str] | None, typer.Argument(help="Ids; their first letters do.", metavar="[ID]...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]


@dataclass(frozen=True)
class Conditions:
    """Which letters are meant, as it stands on the command line."""

    reason: Annotated[list[str] | None, typer.Option(help="Only with this reason; may be repeated.")] = None
    topic: Annotated[
        list[str] | None,
        typer.Option(help="Only what was refused on this topic; may be repeated.", autocompletion=topic_names),
    ] = None
    service: Annotated[list[str] | None, typer.Option(help="Only what this service refused; may be repeated.")] = None
    since: Annotated[
        str | None, typer.Option(help="Refused from this time on: ISO 8601, or 90s, 5min, 2h, 7d ago.")
    ] = None
    until: Annotated[str | None, typer.Option(help="Refused up to this time, exclusive.")] = None
    partition: Annotated[
        list[int] | None, typer.Option(help="Only from this partition of their topic; may be repeated.")
    ] = None
    from_offset: Annotated[int | None, typer.Option(min=0, help="From this offset of their partition on.")] = None
    to_offset: Annotated[int | None, typer.Option(min=0, help="Up to this offset, exclusive.")] = None

    def selection(self, states: tuple[State, ...], ids: list[str] | None = None) -> Selection:
        """Raises `UsageError` for what is no time."""
        from headrace_operations.dead_letters import Selection

        return Selection(
            ids=tuple(ids or ()),
            states=states,
            reasons=tuple(self.reason or ()),
            topics=tuple(self.topic or ()),
            services=tuple(self.service or ()),
            since=parse_time(self.since),
            until=parse_time(self.until),
            partitions=tuple(self.partition or ()),
            from_offset=self.from_offset,
            to_offset=self.to_offset,
        )


@dataclass(frozen=True)
class Meant(Conditions):
    """The letters about which something is to be decided."""

    everything: Annotated[bool, typer.Option("--all", help="All that are open.")] = False
    again: Annotated[bool, typer.Option("--again", help="Also those about which something was decided already.")] = (
        False
    )

    def chosen(self, ids: list[str] | None) -> Selection:
        """Raises `UsageError` unless it is said which ones, or that all are meant."""
        from headrace.errors import UsageError

        wanted = self.selection(() if self.again else ("open",), ids)
        if wanted.chooses == self.everything:
            raise UsageError("name ids or a condition such as --reason, or say --all, not both")
        return wanted


app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="What services refused for good: list, show, put back, give up."
)


def list_letters(
    state: Annotated[
        Literal["open", "retried", "discarded", "all"], typer.Option(help="What was decided about them.")
    ] = "open",
    *,
    conditions: Conditions,
    limit: Annotated[int, typer.Option(min=0, help="Show this many, the newest; all are counted.")] = 30,
    place: BusOptions,
    json: AsJson = False,
) -> None:
    """What was refused, by whom and why, and how many there are of each kind."""
    import asyncio

    from headrace_operations.dead_letters.showing import as_json, counted

    wanted = conditions.selection(() if state == "all" else (state,))
    found, at = asyncio.run(_read(place.address, wanted))
    newest = heapq.nlargest(limit, found, key=lambda one: (one.letter.time, one.id))
    if json:
        made = {"letters": [as_json(one) for one in newest], "counts": counted(found), "unreadable": at.unreadable}
        echo_json(jsonlib.dumps(made, indent=1))
        return
    printed.listed(newest, counted(found), state)
    printed.unreadable(at)


def show(
    letter_id: Annotated[str, typer.Argument(help="The letter's id; its first letters do.", metavar="ID")],
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Write the refused bytes and nothing else.")] = False,
    place: BusOptions,
    json: AsJson = False,
) -> None:
    """One letter: where it was, why it was refused, its headers, what it said, and what was decided about it."""
    import asyncio

    from headrace_operations.dead_letters import Selection
    from headrace_operations.dead_letters.reading import check_ids
    from headrace_operations.dead_letters.showing import as_json

    wanted = Selection(ids=(letter_id,))
    found, _ = asyncio.run(_read(place.address, wanted, keep_values=True))
    check_ids(wanted, [one.id for one in found])
    (one,) = found
    if raw:
        from headrace_cli.terminal import write_raw

        write_raw(one.letter.value)
    elif json:
        echo_json(jsonlib.dumps(as_json(one, with_value=True), indent=1))
    else:
        printed.one_letter(one)


def retry(
    ids: Ids = None,
    *,
    meant: Meant,
    force: Annotated[
        bool, typer.Option("--force", help="Also what would be refused again, as far as can be seen here.")
    ] = False,
    dry_run: DryRun = False,
    place: BusOptions,
    json: AsJson = False,
) -> None:
    """Put refused records back onto their topics, with their keys and headers, once.

    Consumers that had handled one all the same know its id, so nothing has an effect twice. What is refused again is a
    new letter. Exit status 1 when something that was meant cannot be put back.
    """
    import asyncio

    from headrace_operations.dead_letters import actions

    wanted = meant.chosen(ids)
    address = place.address
    made = asyncio.run(_plan(address, "retry", wanted, force=force))
    if not dry_run:
        with progress("putting back") as tick:
            asyncio.run(actions.retry(address, made, _user(), partial(tick, "putting back")))
    printed.outcome(made, "would be put back" if dry_run else "put back", json)


def discard(
    because: Annotated[str, typer.Option(help="Why; it is kept with the decision.", metavar="TEXT")],
    ids: Ids = None,
    *,
    meant: Meant,
    dry_run: DryRun = False,
    place: BusOptions,
    json: AsJson = False,
) -> None:
    """Decide that nothing will be done about refused records, and why. They stay on `dead-letters` until they
    expire."""
    import asyncio

    from headrace.errors import UsageError
    from headrace_operations.dead_letters import actions

    if not because.strip():
        raise UsageError("--because: say why, so that nobody has to ask")
    wanted = meant.chosen(ids)
    address = place.address
    made = asyncio.run(_plan(address, "discard", wanted))
    if not dry_run:
        with progress("discarding") as tick:
            asyncio.run(actions.discard(address, made, because, _user(), partial(tick, "discarding")))
    printed.outcome(made, "would be discarded" if dry_run else "discarded", json)


async def _read(bus: str, wanted: Selection, *, keep_values: bool = False) -> tuple[list[Letter], Cut]:
    from headrace.topics import connected
    from headrace_operations.dead_letters import reading

    async with connected(bus) as topics:
        at = await reading.cut(topics)
        found = [one if keep_values else one.without_value() async for one in reading.read(topics, wanted, at)]
    return found, at


async def _plan(bus: str, action: Literal["retry", "discard"], wanted: Selection, *, force: bool = False) -> Plan:
    from headrace.topics import connected
    from headrace_operations.dead_letters import actions

    async with connected(bus) as topics:
        return await actions.plan(topics, action, wanted, force=force)


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without a user database
        return "unknown"


def add_to(parent: typer.Typer) -> None:
    command(
        app,
        list_letters,
        "headrace dead-letters list",
        "headrace dead-letters list --topic feedback --since 1d --json",
        "headrace dead-letters list --state all --reason invalid_event",
        name="list",
    )
    command(app, show, "headrace dead-letters show 5d3f9d0e", "headrace dead-letters show 5d3f9d0e --raw > record.json")
    command(
        app,
        retry,
        "headrace dead-letters retry 5d3f9d0e",
        "headrace dead-letters retry --reason handler_error --topic trajectories --dry-run",
        "headrace dead-letters retry --topic turns --partition 2 --from-offset 100 --to-offset 200",
    )
    command(
        app,
        discard,
        "headrace dead-letters discard 5d3f9d0e --because 'sent by a load test'",
        "headrace dead-letters discard --service judge --until 2026-01-01 --because 'old rubric'",
    )
    parent.add_typer(app, name="dead-letters")
