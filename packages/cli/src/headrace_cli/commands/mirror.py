"""`headrace mirror`."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.shared import AsJson, DataDir, command, console, echo_json, progress, running, table

if TYPE_CHECKING:
    from headrace_operations.mirror import Mirrored


def mirror(
    to: Annotated[str, typer.Option("--to", help="The bus that gets the copy.", metavar="HOST:PORT")],
    bus: Annotated[
        str | None,
        typer.Option("--from", help="The bus to copy, when it was not started by `up`.", metavar="HOST:PORT"),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Leave this topic out; may be repeated.", metavar="TOPIC")
    ] = None,
    replication: Annotated[
        int, typer.Option(min=1, help="Replication factor of the topics that are created there.")
    ] = 1,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Copy the bus to another one, usually the embedded broker's to Kafka: topics, records and who has read how far.

    Records keep their offsets, and each partition is compared in the end. It may be killed at any moment and run again;
    nothing is written twice. Exit status 1 when the copy is not the whole yet, because something still uses the source.
    """
    import asyncio

    from headrace_operations.mirror import mirror as copy

    source = bus or running(data_dir).bus
    with progress("looking") as tick:
        made = asyncio.run(copy(source, to, without=without or (), replication=replication, report=tick))
    if json:
        echo_json(jsonlib.dumps(_as_json(made), indent=1))
    else:
        _print(made, source, to)
    if made.moving:
        raise typer.Exit(1)


def _print(made: Mirrored, source: str, target: str) -> None:
    out = console()
    rows = [(one.topic, str(one.partition), str(one.records), one.digest[:16]) for one in made.checked if one.records]
    out.print(table(["topic", "partition>", "records>", "equal on both, sha256"], rows))
    for group, places in sorted(made.positions.items()):
        out.print(f"group {group}: positions on {len(places)} partitions", markup=False)
    if made.moving:
        out.print(f"[yellow]equal up to where it ended, but {source} is still in use: {'; '.join(made.moving)}[/]")
        out.print("[yellow]stop everything but the broker and run the same again[/]")
        return
    out.print(f"[green]{target} holds everything that {source} holds[/]")
    out.print(f"start the services with [bold]--set bus.address={target}[/]; the rest is in docs/growing.md")


def _as_json(made: Mirrored) -> dict[str, Any]:
    return {
        "partitions": [
            {"topic": one.topic, "partition": one.partition, "records": one.records, "sha256": one.digest}
            for one in made.checked
        ],
        "groups": {
            group: [
                {"topic": place.topic, "partition": place.partition, "offset": offset}
                for place, (offset, _) in sorted(places.items())
            ]
            for group, places in sorted(made.positions.items())
        },
        "complete": not made.moving,
        "moving": made.moving,
    }


def add_to(app: typer.Typer) -> None:
    command(
        app,
        mirror,
        "headrace mirror --to kafka:9092",
        "headrace mirror --from 127.0.0.1:9092 --to kafka-1:9092,kafka-2:9092 --replication 3",
    )
