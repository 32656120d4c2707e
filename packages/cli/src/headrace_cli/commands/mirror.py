"""`headrace mirror`."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.shared import AsJson, DataDir, command, console, echo_json, progress, running_state, table

if TYPE_CHECKING:
    from headrace_operations.mirror import MirrorResult


def mirror(
    to: Annotated[str, typer.Option("--to", help="Target bus.", metavar="HOST:PORT")],
    bus: Annotated[
        str | None,
        typer.Option("--from", help="Source bus; default: the bus that runs here.", metavar="HOST:PORT"),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Exclude this topic; may be repeated.", metavar="TOPIC")
    ] = None,
    replication: Annotated[int, typer.Option(min=1, help="Replication factor of new topics on the target.")] = 1,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Copy a bus to another one, usually the embedded broker to Kafka: topics, records and group positions.

    Records keep their offsets, and each partition is compared at the end. The command may be interrupted and run again;
    no record is written twice. Exit status 1 if the copy is incomplete because the source is still in use.
    """
    import asyncio

    from headrace_operations.mirror import mirror as copy

    source = bus or running_state(data_dir).bus
    with progress("connecting") as tick:
        result = asyncio.run(copy(source, to, without=without or (), replication=replication, report=tick))
    if json:
        echo_json(jsonlib.dumps(_as_json(result), indent=1))
    else:
        _print(result, source, to)
    if result.moving:
        raise typer.Exit(1)


def _print(result: MirrorResult, source: str, target: str) -> None:
    out = console()
    rows = [
        (check.topic, str(check.partition), str(check.records), check.digest[:16])
        for check in result.checked
        if check.records
    ]
    out.print(table(["topic", "partition>", "records>", "equal on both, sha256"], rows))
    for group, offsets in sorted(result.positions.items()):
        out.print(f"group {group}: positions on {len(offsets)} partitions", markup=False)
    if result.moving:
        out.print(f"[yellow]equal up to the copied end, but {source} is still in use: {'; '.join(result.moving)}[/]")
        out.print("[yellow]stop everything but the broker and run the same command again[/]")
        return
    out.print(f"[green]{target} is a complete copy of {source}[/]")
    out.print(f"start the services with [bold]--set bus.address={target}[/]; docs/growing.md has the next steps")


def _as_json(result: MirrorResult) -> dict[str, Any]:
    return {
        "partitions": [
            {"topic": check.topic, "partition": check.partition, "records": check.records, "sha256": check.digest}
            for check in result.checked
        ],
        "groups": {
            group: [
                {"topic": partition.topic, "partition": partition.partition, "offset": offset}
                for partition, (offset, _) in sorted(offsets.items())
            ]
            for group, offsets in sorted(result.positions.items())
        },
        "complete": not result.moving,
        "moving": result.moving,
    }


def add_to(app: typer.Typer) -> None:
    command(
        app,
        mirror,
        "headrace mirror --to kafka:9092",
        "headrace mirror --from 127.0.0.1:9092 --to kafka-1:9092,kafka-2:9092 --replication 3",
    )
