"""`headrace replay events`, the command group `headrace replay`, and the output of replays as tables or JSON."""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands import replay_train
from headrace_cli.commands.shared import (
    BusOptions,
    Commands,
    RangeOptions,
    command,
    console,
    progress,
    table,
    topic_names,
)

if TYPE_CHECKING:
    from headrace.topics import Entry, Range
    from headrace_operations.replay.request import Report

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

    topic_range = range_options.range_of(topic)
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
    """Return the position of a record and its event, or the reason why it cannot be parsed, as one line of JSON."""
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


def as_json(report: Report) -> str:
    """Return all counts of a replay's report as JSON."""
    from pydantic import BaseModel

    output: dict[str, Any] = {field.name: getattr(report, field.name) for field in fields(report)}
    for name, part in output.items():
        output[name] = part.model_dump(mode="json") if isinstance(part, BaseModel) else part
    output["same"] = report.same
    return json.dumps(output, indent=1)


def show(report: Report, *, planned: bool) -> None:
    """Print the report of a replay in the order of its steps: records, verdicts, training."""
    out = console()
    out.print(table(["records", "", "count>"], _records(report), f"{report.source} of lineage {report.of}"))
    verdicts = _outcomes(report)
    if verdicts:
        out.print(table(["verdicts", "outcome", "count>"], verdicts))
    training = report.training
    if training is not None:
        rows = [("trained", "", str(training.trained))]
        rows += [("dropped", reason, str(count)) for reason, count in training.dropped.items()]
        rows += [("ignored", "duplicates", str(training.duplicates))] if training.duplicates else []
        rows += [("waiting", "too few for a batch", str(training.waiting))] if training.waiting else []
        out.print(table(["experiences", "", "count>"], rows, f"{'would be' if planned else 'were'} trained"))
        summary = f"{len(training.batches)} batches, {training.versions} versions"
        out.print(f"{summary}; cut {_cut(report)}", markup=False)
        _compare(report)
    if report.version is not None:
        out.print(f"[green]done[/]: {report.version} is the last version of lineage {report.lineage}")
        out.print(f"it is not served; [bold]headrace replay offer {report.lineage}[/] lets the registry evaluate it")


def _records(report: Report) -> list[tuple[str, str, str]]:
    rows = [("read", "", str(report.read)), ("selected", "", str(report.selected))]
    rows += [("unreadable", "", str(report.unreadable))] if report.unreadable else []
    rows += [("of another model", "", str(report.other_models))] if report.other_models else []
    rows += [("experiences", kind, str(count)) for kind, count in sorted(report.kinds.items())]
    if report.scored is not None:
        rows += [("without experience", why, str(count)) for why, count in report.scored.not_trained.items()]
    rows += [("with version", version, str(count)) for version, count in report.versions.most_common(20)]
    return rows


def _outcomes(report: Report) -> list[tuple[str, str, str]]:
    outcomes_by_source: dict[str, Mapping[str, int]] = {}
    for part in (report.judged, report.scored):
        outcomes_by_source |= part.outcomes if part is not None else {}
    return [
        (source, outcome, str(count))
        for source, counts in outcomes_by_source.items()
        for outcome, count in counts.items()
    ]


def _cut(report: Report) -> str:
    how = "where they once were" if report.cut == "recorded" else "by the settings"
    return f"{how} ({report.cut_because})"


def _compare(report: Report) -> None:
    out = console()
    if report.same:
        out.print(f"[green]the batches are those of lineage {report.of}, byte for byte[/]")
    elif report.batches_of_original:
        equal, total = report.batches_equal, report.batches_of_original
        out.print(f"the first {equal} of the {total} batches of lineage {report.of} are equal, byte for byte")
