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
    help="Train again from what the topics still hold, with another reward, judge or algorithm; or just read it. "
    "Nobody who listens is disturbed.\n\n"
    "Start with [bold]plan[/], which shows what would happen. Then [bold]run[/], look at the result, and "
    "[bold]offer[/] it to the registry if it is to serve.",
)


def events(
    topic: Annotated[str, typer.Argument(help="The topic.", autocompletion=topic_names)],
    *,
    chosen: RangeOptions,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many events.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
    count: Annotated[bool, typer.Option("--count", help="Only count, write nothing.")] = False,
    place: BusOptions,
) -> None:
    """Write a range of a topic as JSON lines: where each record was, and its event or the reason why it is none.

    Counts go to standard error, with a progress bar in a terminal.
    """
    import asyncio

    wanted = chosen.of(topic)
    address = place.address
    with ExitStack() as stack:
        target: IO[str] | None = None if count else sys.stdout
        if output is not None and not count:
            target = stack.enter_context(output.open("w", encoding="utf-8"))
        counts = asyncio.run(_copy(address, wanted, target, limit))
    words = [f"{counts['events']} events"]
    words += [f"{number} {name}" for name, number in counts.items() if name not in ("events", "read")]
    console(stderr=True).print(f"{topic}: {', '.join(words)} of {counts['read']} records in the range")


async def _copy(address: str, wanted: Range, target: IO[str] | None, limit: int | None) -> collections.Counter[str]:
    from headrace.topics import Progress, connected

    counts = collections.Counter(events=0, read=0)
    reading = Progress()
    async with connected(address) as topics:
        with progress(wanted.topic) as tick:
            async for entry in topics.read(wanted, reading):
                counts["events" if entry.event is not None else "unreadable"] += 1
                if target is not None:
                    target.write(line_of(entry) + "\n")
                tick(wanted.topic, reading.passed, reading.total)
                if limit is not None and counts["events"] >= limit:
                    break
    counts["read"] = reading.total
    return counts


def line_of(entry: Entry) -> str:
    """One JSON object without line breaks."""
    from headrace_cli.terminal import ascii_json

    found: dict[str, Any] = {
        "topic": entry.topic,
        "partition": entry.partition,
        "offset": entry.offset,
        "time": entry.time.isoformat(),
        "key": entry.key,
    }
    if entry.event is None:
        return json.dumps({**found, "problem": entry.problem})
    found |= {"id": entry.event.event_id, "type": entry.event.type}
    head = json.dumps(found)
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
