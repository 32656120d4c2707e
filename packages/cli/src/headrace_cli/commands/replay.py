"""`headrace replay events`, and the group that it is in."""

from __future__ import annotations

import collections
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands import replay_train
from headrace_cli.commands.ranges import RangeOptions
from headrace_cli.commands.shared import BusOptions, Commands, command, console, progress, topic_names

if TYPE_CHECKING:
    from headrace.topics import Entry, Range


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Train again on stored events with another reward, judge or algorithm, or read a range of a topic. "
    "Live consumers are not affected.\n\n"
    "Start with [bold]plan[/], which shows what would be trained. Then [bold]run[/], look at the result, and "
    "[bold]offer[/] it to the registry to have it evaluated.",
)


def events(
    topic: Annotated[str, typer.Argument(help="Topic to read.", autocompletion=topic_names)],
    *,
    range_options: RangeOptions,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of events.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    count: Annotated[bool, typer.Option("--count", help="Only count the events.")] = False,
    bus_options: BusOptions,
) -> None:
    """Write a range of a topic as JSON lines: the position of each record, and its event or why it cannot be parsed.

    Counts go to standard error, with a progress bar in a terminal.
    """
    import asyncio

    topic_range = range_options.of(topic)
    address = bus_options.address
    with ExitStack() as stack:
        target: IO[str] | None = None if count else sys.stdout
        if output is not None and not count:
            target = stack.enter_context(output.open("w", encoding="utf-8"))
        counts = asyncio.run(_copy(address, topic_range, target, limit))
    words = [f"{counts['events']} events"]
    words += [f"{number} {name}" for name, number in counts.items() if name not in ("events", "read")]
    console(stderr=True).print(f"{topic}: {', '.join(words)} of {counts['read']} records in the range")


async def _copy(
    address: str, topic_range: Range, target: IO[str] | None, limit: int | None
) -> collections.Counter[str]:
    from headrace.topics import Progress, connected

    counts = collections.Counter(events=0, read=0)
    reading = Progress()
    async with connected(address) as topics:
        with progress(topic_range.topic) as tick:
            async for entry in topics.read(topic_range, reading):
                counts["events" if entry.event is not None else "unreadable"] += 1
                if target is not None:
                    target.write(entry_as_json(entry) + "\n")
                tick(topic_range.topic, reading.passed, reading.total)
                if limit is not None and counts["events"] >= limit:
                    break
    counts["read"] = reading.total
    return counts


def entry_as_json(entry: Entry) -> str:
    """Return an entry as one JSON object without line breaks."""
    from headrace_cli.terminal import ascii_json

    fields: dict[str, Any] = {
        "topic": entry.topic,
        "partition": entry.partition,
        "offset": entry.offset,
        "time": entry.time.isoformat(),
        "key": entry.key,
    }
    if entry.event is None:
        return json.dumps({**fields, "problem": entry.problem})
    fields |= {"id": entry.event.event_id, "type": entry.event.type}
    head = json.dumps(fields)
    return f'{head[:-1]}, "event": {ascii_json(entry.event.to_json().decode())}}}'


def add_to(parent: typer.Typer) -> None:
    command(
        app,
        events,
        "headrace replay events turns --since 1h",
        "headrace replay events trajectories --session run-7 --session run-8 -o runs.jsonl",
        "headrace replay events experiences --partition 0 --from-offset 100 --to-offset 200",
        "headrace replay events rewards --since 2026-01-01T00:00:00Z --count",
    )
    replay_train.add_to(app)
    parent.add_typer(app, name="replay")
