"""`headrace dead-letters`: list, show, retry and discard dead-lettered records."""

from __future__ import annotations

import heapq
import json as jsonlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace_cli.commands import dead_letters_printed as printed
from headrace_cli.commands.ranges import parse_time
from headrace_cli.commands.shared import AsJson, BusOptions, Commands, command, echo_json, progress, topic_names

if TYPE_CHECKING:
    from headrace_operations.dead_letters import Letter, Plan, Selection
    from headrace_operations.dead_letters.reading import Cut, State


Ids = Annotated[list[str] | None, typer.Argument(help="Ids or their first characters.", metavar="[ID]...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")]


@dataclass(frozen=True)
class LetterFilter:
    """Filter of dead letters on the command line."""

    reason: Annotated[list[str] | None, typer.Option(help="Select this reason; may be repeated.")] = None
    topic: Annotated[
        list[str] | None,
        typer.Option(help="Select records of this topic; may be repeated.", autocompletion=topic_names),
    ] = None
    service: Annotated[
        list[str] | None, typer.Option(help="Select records that this service refused; may be repeated.")
    ] = None
    since: Annotated[
        str | None, typer.Option(help="Oldest refusal: ISO 8601, or an age such as 90s, 5min, 2h, 7d.")
    ] = None
    until: Annotated[str | None, typer.Option(help="End time of the refusal, exclusive.")] = None
    partition: Annotated[
        list[int] | None, typer.Option(help="Select records of this partition of their topic; may be repeated.")
    ] = None
    from_offset: Annotated[int | None, typer.Option(min=0, help="First offset in the partition.")] = None
    to_offset: Annotated[int | None, typer.Option(min=0, help="End offset in the partition, exclusive.")] = None

    def selection(self, states: tuple[State, ...], ids: list[str] | None = None) -> Selection:
        """Return the filter as a selection.

        Raises:
            UsageError: `since` or `until` is not a time.
        """
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
class DecisionFilter(LetterFilter):
    """Filter of the letters that are retried or discarded."""

    everything: Annotated[bool, typer.Option("--all", help="Select all open letters.")] = False
    again: Annotated[bool, typer.Option("--again", help="Include letters that were retried or discarded before.")] = (
        False
    )

    def selection_to_decide(self, ids: list[str] | None) -> Selection:
        """Return the selection, which needs ids, a condition or `--all`.

        Raises:
            UsageError: neither or both were given.
        """
        from headrace.errors import UsageError

        selection = self.selection(() if self.again else ("open",), ids)
        if selection.chooses == self.everything:
            raise UsageError(
                "select letters by id or by a condition such as --reason, or all of them with --all, not both"
            )
        return selection


app = typer.Typer(cls=Commands, no_args_is_help=True, help="Inspect and retry dead-lettered records.")


def list_letters(
    state: Annotated[
        Literal["open", "retried", "discarded", "all"], typer.Option(help="State of the letters.")
    ] = "open",
    *,
    letter_filter: LetterFilter,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of listed letters, newest first.")] = 30,
    bus_options: BusOptions,
    json: AsJson = False,
) -> None:
    """List dead letters with service, reason and error, and count them by kind."""
    import asyncio

    from headrace_operations.dead_letters.reading import as_json, count_letters

    selection = letter_filter.selection(() if state == "all" else (state,))
    letters, at = asyncio.run(_read(bus_options.address, selection))
    newest = heapq.nlargest(limit, letters, key=lambda letter: (letter.letter.time, letter.id))
    if json:
        output = {
            "letters": [as_json(letter) for letter in newest],
            "counts": count_letters(letters),
            "unreadable": at.unreadable,
        }
        echo_json(jsonlib.dumps(output, indent=1))
        return
    printed.print_list(newest, count_letters(letters), state)
    printed.print_unreadable(at)


def show(
    letter_id: Annotated[str, typer.Argument(help="Id of the letter or its first characters.", metavar="ID")],
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Write only the refused bytes.")] = False,
    bus_options: BusOptions,
    json: AsJson = False,
) -> None:
    """Show one dead letter: position, reason, error, headers, value and decisions."""
    import asyncio

    from headrace_operations.dead_letters import Selection
    from headrace_operations.dead_letters.reading import as_json, check_ids

    selection = Selection(ids=(letter_id,))
    letters, _ = asyncio.run(_read(bus_options.address, selection, keep_values=True))
    check_ids(selection, [entry.id for entry in letters])
    (letter,) = letters
    if raw:
        from headrace_cli.terminal import write_raw

        write_raw(letter.letter.value)
    elif json:
        echo_json(jsonlib.dumps(as_json(letter, with_value=True), indent=1))
    else:
        printed.print_letter(letter)


def retry(
    ids: Ids = None,
    *,
    decision_filter: DecisionFilter,
    force: Annotated[bool, typer.Option("--force", help="Retry also records that would be refused again.")] = False,
    dry_run: DryRun = False,
    bus_options: BusOptions,
    json: AsJson = False,
) -> None:
    """Put refused records back onto their topics, with their keys and headers, once.

    A consumer that had processed a record already recognizes its id, so no record takes effect twice. A record that is
    refused again is a new letter. Exit status 1 if a selected record cannot be put back.
    """
    import asyncio

    from headrace_operations.dead_letters import actions

    selection = decision_filter.selection_to_decide(ids)
    address = bus_options.address
    plan = asyncio.run(_plan(address, "retry", selection, force=force))
    if not dry_run:
        with progress("putting back") as tick:
            asyncio.run(actions.retry(address, plan, _user(), partial(tick, "putting back")))
    printed.print_outcome(plan, "would be put back" if dry_run else "put back", json)


def discard(
    because: Annotated[str, typer.Option(help="Reason, which is stored with the decision.", metavar="TEXT")],
    ids: Ids = None,
    *,
    decision_filter: DecisionFilter,
    dry_run: DryRun = False,
    bus_options: BusOptions,
    json: AsJson = False,
) -> None:
    """Discard refused records with a reason. They stay on `dead-letters` until they expire."""
    import asyncio

    from headrace.errors import UsageError
    from headrace_operations.dead_letters import actions

    if not because.strip():
        raise UsageError("--because: is empty; give the reason for the decision")
    selection = decision_filter.selection_to_decide(ids)
    address = bus_options.address
    plan = asyncio.run(_plan(address, "discard", selection))
    if not dry_run:
        with progress("discarding") as tick:
            asyncio.run(actions.discard(address, plan, because, _user(), partial(tick, "discarding")))
    printed.print_outcome(plan, "would be discarded" if dry_run else "discarded", json)


async def _read(bus: str, selection: Selection, *, keep_values: bool = False) -> tuple[list[Letter], Cut]:
    from headrace.topics import connected
    from headrace_operations.dead_letters import reading

    async with connected(bus) as topics:
        at = await reading.read_cut(topics)
        letters = [
            letter if keep_values else letter.without_value() async for letter in reading.read(topics, selection, at)
        ]
    return letters, at


async def _plan(bus: str, action: Literal["retry", "discard"], selection: Selection, *, force: bool = False) -> Plan:
    from headrace.topics import connected
    from headrace_operations.dead_letters import actions

    async with connected(bus) as topics:
        return await actions.plan(topics, action, selection, force=force)


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
