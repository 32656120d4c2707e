"""`headrace dead-letters`: list, show, retry and discard dead-lettered records, and its output."""

from __future__ import annotations

import heapq
import json as jsonlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headrace_cli.commands.shared import (
    AsJson,
    BusOptions,
    Commands,
    command,
    console,
    echo_json,
    parse_time,
    progress,
    table,
    topic_names,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_operations.dead_letters import Letter, Plan, Selection, Snapshot, State
    from headrace_schemas import DeadLetterDecision


Ids = Annotated[list[str] | None, typer.Argument(help="Ids or their first characters.", metavar="[ID]...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")]


@dataclass(frozen=True)
class LetterFilter:
    """Options that filter dead letters."""

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
    """Options that select the letters to retry or discard."""

    everything: Annotated[bool, typer.Option("--all", help="Select all open letters.")] = False
    again: Annotated[bool, typer.Option("--again", help="Include letters that were retried or discarded before.")] = (
        False
    )

    def selection_to_decide(self, ids: list[str] | None) -> Selection:
        """Return the selected letters as a filter. Ids, a condition or `--all` must be given.

        Raises:
            UsageError: none of these is given, or ids or a condition together with `--all`.
        """
        from headrace.errors import UsageError

        selection = self.selection(() if self.again else ("open",), ids)
        if selection.has_conditions == self.everything:
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

    from headrace_operations.dead_letters import as_json, count_letters

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
    print_list(newest, count_letters(letters), state)
    print_unreadable(at)


def show(
    letter_id: Annotated[str, typer.Argument(help="Id of the letter or its first characters.", metavar="ID")],
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Write only the refused bytes.")] = False,
    bus_options: BusOptions,
    json: AsJson = False,
) -> None:
    """Show one dead letter: position, reason, error, headers, value and decisions."""
    import asyncio

    from headrace_operations.dead_letters import Selection, as_json, check_ids

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
        print_letter(letter)


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

    from headrace_operations import dead_letters

    selection = decision_filter.selection_to_decide(ids)
    address = bus_options.address
    plan = asyncio.run(_plan(address, "retry", selection, force=force))
    if not dry_run:
        with progress("putting back") as tick:
            asyncio.run(dead_letters.retry(address, plan, _user(), partial(tick, "putting back")))
    print_outcome(plan, "would be put back" if dry_run else "put back", json)


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
    from headrace_operations import dead_letters

    if not because.strip():
        raise UsageError("--because: is empty; give the reason for the decision")
    selection = decision_filter.selection_to_decide(ids)
    address = bus_options.address
    plan = asyncio.run(_plan(address, "discard", selection))
    if not dry_run:
        with progress("discarding") as tick:
            asyncio.run(dead_letters.discard(address, plan, because, _user(), partial(tick, "discarding")))
    print_outcome(plan, "would be discarded" if dry_run else "discarded", json)


async def _read(bus: str, selection: Selection, *, keep_values: bool = False) -> tuple[list[Letter], Snapshot]:
    from headrace.topics import connected
    from headrace_operations import dead_letters

    async with connected(bus) as topics:
        at = await dead_letters.read_snapshot(topics)
        letters = [
            letter if keep_values else letter.without_value()
            async for letter in dead_letters.read(topics, selection, at)
        ]
    return letters, at


async def _plan(bus: str, action: Literal["retry", "discard"], selection: Selection, *, force: bool = False) -> Plan:
    from headrace.topics import connected
    from headrace_operations import dead_letters

    async with connected(bus) as topics:
        return await dead_letters.plan(topics, action, selection, force=force)


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


_ID_SHOWN = 8
_ERROR_SHOWN = 80
_HELD_BACK_SHOWN = 20


def print_list(newest: Sequence[Letter], counts: list[dict[str, Any]], state: str) -> None:
    """Print a table of the newest letters, then the number of all letters by kind."""
    from rich.text import Text

    from headrace_operations.dead_letters import escape_control_characters

    out = console()
    if not counts:
        out.print("no dead letters" if state == "all" else f"no dead letters that are {state}")
        return
    rows = [
        (letter.id[:_ID_SHOWN], letter.state, letter.letter.time.isoformat(" ", "seconds")[:19],
         letter.letter.service, letter.position, letter.letter.reason,
         Text(escape_control_characters(letter.letter.error.replace("\n", " "))[:_ERROR_SHOWN]))
        for letter in newest
    ]  # fmt: skip
    if rows:
        header = ["id", "state", "refused (UTC)", "by", "where it was", "reason", "error"]
        out.print(table(header, rows))  # type: ignore[arg-type]
    columns = ("service", "topic", "reason", "open", "retried", "discarded")
    summary = [tuple(str(row[name]) for name in columns) for row in counts]
    out.print(table(["by", "topic", "reason", "open>", "retried>", "discarded>"], summary, "counts"))


def print_letter(letter: Letter) -> None:
    """Print the fields, the decisions and the headers of one letter, and the refused bytes."""
    from headrace_operations.dead_letters import decode_value, escape_control_characters

    out, record = console(), letter.letter
    facts = [
        ("id", letter.id),
        ("state", letter.state),
        ("refused", f"{record.time.isoformat()} by {record.service}, after {record.attempts} attempts"),
        ("reason", record.reason),
        ("error", record.error),
        ("was at", letter.position),
        ("event id", record.source_id),
        ("key", record.source_key or "none"),
        *([("retry of", letter.retry_of)] if letter.retry_of else []),
        *((f"decision {item.number}", _decision(item)) for item in letter.decisions),
        *((f"header {name}", text) for name, text in record.headers.items()),
    ]
    for name, text in facts:
        out.print(f"{escape_control_characters(name):<16} {escape_control_characters(text)}", markup=False)
    out.print(f"{len(record.value)} bytes:", style="dim")
    out.print(decode_value(record.value), markup=False)


def _decision(item: DeadLetterDecision) -> str:
    why = f": {item.reason}" if item.reason else ""
    return f"{item.action} {item.time.isoformat()} by {item.by or 'unknown'}{why}"


def print_unreadable(at: Snapshot) -> None:
    """Warn about records on `dead-letters` that cannot be parsed."""
    if at.unreadable:
        position, problem = next(iter(at.unreadable.items()))
        console(stderr=True).print(
            f"[yellow]{len(at.unreadable)} records on dead-letters cannot be parsed, such as {position}: {problem}[/]"
        )


def print_outcome(plan: Plan, words: str, json: bool) -> None:
    """Print the result of a retry or discard. Exit with status 1 if letters could not be retried."""
    if json:
        not_retriable = [{"id": name, "problem": problem} for name, (_, problem) in plan.not_retriable.items()]
        echo_json(jsonlib.dumps({"outcome": words, "ids": list(plan.chosen), "held_back": not_retriable}, indent=1))
    else:
        out = console()
        out.print(f"{len(plan.chosen)} dead letters {words}")
        for letter, problem in list(plan.not_retriable.values())[:_HELD_BACK_SHOWN]:
            out.print(f"  not {letter.id[:_ID_SHOWN]} ({letter.position}): {problem}", markup=False, style="yellow")
        if len(plan.not_retriable) > _HELD_BACK_SHOWN:
            out.print(f"  and {len(plan.not_retriable) - _HELD_BACK_SHOWN} more", style="yellow")
    print_unreadable(plan.at)
    if plan.not_retriable:
        raise typer.Exit(1)
