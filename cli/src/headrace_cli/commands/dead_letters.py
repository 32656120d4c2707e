"""`headrace dead-letters`: what services refused for good; look at it, put it back, give it up."""

from __future__ import annotations

import heapq
import json as jsonlib
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headrace_cli.commands import dead_letters_printed as printed
from headrace_cli.commands.shared import AsJson, Commands, DataDir, command, console, running
from headrace_cli.commands.times import parse_time

if TYPE_CHECKING:
    from headrace_cli.dead_letters import Letter, Plan, Selection
    from headrace_cli.dead_letters.reading import Cut


def _topics() -> list[str]:
    from headrace_schemas import EVENTS

    return sorted(EVENTS)


Ids = Annotated[list[str] | None, typer.Argument(help="Ids; their first letters do.", metavar="[ID]...")]
Reason = Annotated[list[str] | None, typer.Option(help="Only with this reason; may be repeated.")]
Topic = Annotated[
    list[str] | None,
    typer.Option(help="Only what was refused on this topic; may be repeated.", autocompletion=_topics),
]
ByService = Annotated[list[str] | None, typer.Option(help="Only what this service refused; may be repeated.")]
Since = Annotated[str | None, typer.Option(help="Refused from this time on: ISO 8601, or 90s, 5min, 2h, 7d ago.")]
Until = Annotated[str | None, typer.Option(help="Refused up to this time, exclusive.")]
Partition = Annotated[list[int] | None, typer.Option(help="Only from this partition of their topic; may be repeated.")]
FromOffset = Annotated[int | None, typer.Option(min=0, help="From this offset of their partition on.")]
ToOffset = Annotated[int | None, typer.Option(min=0, help="Up to this offset, exclusive.")]
Everything = Annotated[bool, typer.Option("--all", help="All that are open.")]
Again = Annotated[bool, typer.Option("--again", help="Also those about which something was decided already.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]
Bus = Annotated[str | None, typer.Option(help="The bus, when it was not started by `up`.", metavar="HOST:PORT")]

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="What services refused for good: list, show, put back, give up."
)


def list_letters(
    state: Annotated[
        Literal["open", "retried", "discarded", "all"], typer.Option(help="What was decided about them.")
    ] = "open",
    reason: Reason = None,
    topic: Topic = None,
    service: ByService = None,
    since: Since = None,
    until: Until = None,
    partition: Partition = None,
    from_offset: FromOffset = None,
    to_offset: ToOffset = None,
    limit: Annotated[int, typer.Option(min=0, help="Show this many, the newest; all are counted.")] = 30,
    bus: Bus = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """What was refused, by whom and why, and how many there are of each kind."""
    import asyncio

    from headrace_cli.dead_letters.showing import as_json, counted

    wanted = _selection(None, reason, topic, service, since, until, partition, from_offset, to_offset, state)
    found, at = asyncio.run(_read(bus or running(data_dir).bus, wanted))
    newest = heapq.nlargest(limit, found, key=lambda one: (one.letter.time, one.id))
    if json:
        made = {"letters": [as_json(one) for one in newest], "counts": counted(found), "unreadable": at.unreadable}
        typer.echo(jsonlib.dumps(made, indent=1))
        return
    printed.listed(newest, counted(found), state)
    printed.unreadable(at)


def show(
    letter_id: Annotated[str, typer.Argument(help="The letter's id; its first letters do.", metavar="ID")],
    raw: Annotated[bool, typer.Option("--raw", help="Write the refused bytes and nothing else.")] = False,
    bus: Bus = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """One letter: where it was, why it was refused, its headers, what it said, and what was decided about it."""
    import asyncio

    from headrace_cli.dead_letters import Selection
    from headrace_cli.dead_letters.reading import check_ids
    from headrace_cli.dead_letters.showing import as_json

    wanted = Selection(ids=(letter_id,))
    found, _ = asyncio.run(_read(bus or running(data_dir).bus, wanted, keep_values=True))
    check_ids(wanted, [one.id for one in found])
    (one,) = found
    if raw:
        sys.stdout.buffer.write(one.letter.value)
    elif json:
        typer.echo(jsonlib.dumps(as_json(one, with_value=True), indent=1))
    else:
        printed.one_letter(one)


def retry(
    ids: Ids = None,
    reason: Reason = None,
    topic: Topic = None,
    service: ByService = None,
    since: Since = None,
    until: Until = None,
    partition: Partition = None,
    from_offset: FromOffset = None,
    to_offset: ToOffset = None,
    everything: Everything = False,
    again: Again = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also what would be refused again, as far as can be seen here.")
    ] = False,
    dry_run: DryRun = False,
    bus: Bus = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Put refused records back onto their topics, with their keys and headers, once.

    Consumers that had handled one all the same know its id, so nothing has an effect twice. What is refused again is a
    new letter. Exit status 1 when something that was meant cannot be put back.
    """
    import asyncio

    from headrace_cli.dead_letters import actions

    states = "all" if again else "open"
    wanted = _selection(ids, reason, topic, service, since, until, partition, from_offset, to_offset, states)
    _check_chosen(wanted, everything)
    address = bus or running(data_dir).bus
    made = asyncio.run(_plan(address, "retry", wanted, force=force))
    if not dry_run:
        with _bar("putting back") as report:
            asyncio.run(actions.retry(address, made, _user(), report))
    printed.outcome(made, "would be put back" if dry_run else "put back", json)


def discard(
    because: Annotated[str, typer.Option(help="Why; it is kept with the decision.", metavar="TEXT")],
    ids: Ids = None,
    reason: Reason = None,
    topic: Topic = None,
    service: ByService = None,
    since: Since = None,
    until: Until = None,
    partition: Partition = None,
    from_offset: FromOffset = None,
    to_offset: ToOffset = None,
    everything: Everything = False,
    again: Again = False,
    dry_run: DryRun = False,
    bus: Bus = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Decide that nothing will be done about refused records, and why. They stay on `dead-letters` until they
    expire."""
    import asyncio

    from headrace.errors import UsageError
    from headrace_cli.dead_letters import actions

    if not because.strip():
        raise UsageError("--because: say why, so that nobody has to ask")
    states = "all" if again else "open"
    wanted = _selection(ids, reason, topic, service, since, until, partition, from_offset, to_offset, states)
    _check_chosen(wanted, everything)
    address = bus or running(data_dir).bus
    made = asyncio.run(_plan(address, "discard", wanted))
    if not dry_run:
        with _bar("discarding") as report:
            asyncio.run(actions.discard(address, made, because, _user(), report))
    printed.outcome(made, "would be discarded" if dry_run else "discarded", json)


def _selection(
    ids: list[str] | None,
    reason: list[str] | None,
    topic: list[str] | None,
    service: list[str] | None,
    since: str | None,
    until: str | None,
    partition: list[int] | None,
    from_offset: int | None,
    to_offset: int | None,
    state: str,
) -> Selection:
    from headrace_cli.dead_letters import Selection

    return Selection(
        ids=tuple(ids or ()),
        states=() if state == "all" else (state,),  # type: ignore[arg-type]
        reasons=tuple(reason or ()),
        topics=tuple(topic or ()),
        services=tuple(service or ()),
        since=parse_time(since),
        until=parse_time(until),
        partitions=tuple(partition or ()),
        from_offset=from_offset,
        to_offset=to_offset,
    )


def _check_chosen(wanted: Selection, everything: bool) -> None:
    from headrace.errors import UsageError

    if wanted.chooses == everything:
        raise UsageError("name ids or a condition such as --reason, or say --all, not both")


async def _read(bus: str, wanted: Selection, *, keep_values: bool = False) -> tuple[list[Letter], Cut]:
    from headrace.topics import connected
    from headrace_cli.dead_letters import reading

    async with connected(bus) as topics:
        at = await reading.cut(topics)
        found = [one if keep_values else one.without_value() async for one in reading.read(topics, wanted, at)]
    return found, at


async def _plan(bus: str, action: Literal["retry", "discard"], wanted: Selection, *, force: bool = False) -> Plan:
    from headrace.topics import connected
    from headrace_cli.dead_letters import actions

    async with connected(bus) as topics:
        return await actions.plan(topics, action, wanted, force=force)


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without a user database
        return "unknown"


def _bar(words: str) -> Any:
    """A progress bar in a terminal, as a context whose value is called with what is done and what there is."""
    import contextlib

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    @contextlib.contextmanager
    def shown() -> Any:
        columns = (TextColumn(words), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console(stderr=True), transient=True) as progress:
            task = progress.add_task(words, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    return shown()


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
