"""`headrace controls`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import (
    AsJson,
    Config,
    DataDir,
    command,
    console,
    echo_json,
    progress,
    running,
    table,
)
from headrace_cli.commands.times import parse_time

if TYPE_CHECKING:
    from headrace_operations.controls.kinds import Control
    from headrace_operations.controls.report import Report
    from headrace_operations.controls.statistics import Mean
    from headrace_schemas import Experience

_RANGE = "What is trained"


def controls(
    recording: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="JSON lines of `headrace replay events experiences`, in place of the topic.",
            metavar="FILE",
            rich_help_panel=_RANGE,
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="From this time on: ISO 8601, or 90s, 5min, 2h, 7d ago.", rich_help_panel=_RANGE)
    ] = None,
    until: Annotated[str | None, typer.Option(help="Up to this time, exclusive.", rich_help_panel=_RANGE)] = None,
    most: Annotated[
        int, typer.Option(min=1, max=16_384, help="The latest so many experiences.", rich_help_panel=_RANGE)
    ] = 2048,
    only: Annotated[list[str] | None, typer.Option(help="Only this control; may be repeated.", metavar="NAME")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Trainings of each control.")] = 2,
    plays: Annotated[
        int | None, typer.Option(min=2, help="Of audit tasks; default: registry.gate.audit_tasks.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="Another setting; may be repeated.", metavar="SECTION.KEY=VALUE"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where controls.json and controls.png go.")] = Path("reports"),
    config: Config = None,
    bus: Annotated[str | None, typer.Option(help="The bus, when `up` does not run here.", metavar="HOST:PORT")] = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Ask whether it is your reward that teaches: train on recorded traffic with rewards that must teach nothing.

    Each control is a short training from the base, on the same experiences: with their rewards, with the rewards
    shuffled, flipped and drawn by lot, with a learning rate of 0, and with each source of rewards alone. The gate's
    program plays audit tasks with what comes of each. Everything happens in a scratch folder, on a bus of its own, and
    nothing of it serves. Exits with 1 when a control did not come out as it has to.
    """
    import asyncio
    import os
    import tempfile

    from headrace_operations.controls import plot, runner
    from headrace_operations.controls import recording as recorded
    from headrace_operations.supervisor.overrides import Overrides, parse_assignments

    changed = parse_assignments(settings or [])
    overrides = Overrides(config, changed, os.environ)
    found = _experiences(recording, since, until, bus or str(overrides.get("bus.address") or ""), data_dir)
    usable = recorded.usable(found, str(overrides.get("trainer.model") or "headrace"), most)
    with tempfile.TemporaryDirectory(prefix="headrace-controls-") as scratch:
        request = runner.Request(
            experiences=usable,
            controls=_chosen(usable, only),
            seeds=seeds,
            plays=plays or int(overrides.get("registry.gate.audit_tasks") or 200),
            scratch=Path(scratch),
            config=config,
            settings=changed,
            environ=os.environ,
        )
        with progress("reading") as tick:
            report = asyncio.run(runner.run(request, tick))
    _tell(report, out, json=json)
    plot.draw(report, out / "controls.png")
    if report.problems:
        raise typer.Exit(1)


def _experiences(
    recording: Path | None, since: str | None, until: str | None, bus: str, data_dir: Path | None
) -> list[Experience]:
    import asyncio

    from headrace.topics import Range
    from headrace_operations.controls.recording import from_bus, from_file

    if recording is not None:
        return from_file(recording)
    wanted = Range("experiences", since=parse_time(since), until=parse_time(until))
    return asyncio.run(from_bus(bus or running(data_dir).bus, wanted))


def _chosen(experiences: list[Experience], only: list[str] | None) -> list[Control]:
    from headrace.errors import UsageError
    from headrace_operations.controls.kinds import CONTROLS, alone, sources_of

    sources = sources_of(experiences)
    offered = [*CONTROLS, *(alone(source) for source in sources if len(sources) > 1)]
    unknown = sorted(set(only or ()) - {one.name for one in offered})
    if unknown:
        raise UsageError(f"no control {unknown[0]!r}; there are {', '.join(one.name for one in offered)}")
    return [one for one in offered if not only or one.name in only]


def _tell(report: Report, out: Path, *, json: bool) -> None:
    import json as encoder

    text = encoder.dumps(report.as_json(), indent=1)
    out.mkdir(parents=True, exist_ok=True)
    (out / "controls.json").write_text(text + "\n", encoding="utf-8")
    if json:
        echo_json(text)
        return
    rows = [("base", _number(report.base), "", "")]
    rows += [(row.control.name, _number(row.score), row.gain_text, row.verdict) for row in report.rows]
    title = f"{report.experiences} experiences, ± one standard error"
    console().print(table(["control", "held-out score>", "gain>", "than the base"], rows, title))
    for problem in report.problems:
        console().print(f"[red]not as it has to be[/]: {problem}")
    for advice in report.advice:
        console().print(f"[yellow]could be better[/]: {advice}")


def _number(mean: Mean) -> str:
    return f"{mean.value:.3f} ± {mean.error:.3f}"


def add_to(app: typer.Typer) -> None:
    command(
        app,
        controls,
        "headrace controls --config headrace.toml",
        "headrace controls --config headrace.toml --since 7d --seeds 5",
        "headrace controls --from experiences.jsonl --only true --only shuffled --config headrace.toml",
    )
