"""`headrace controls`."""

from __future__ import annotations

from collections.abc import Sequence
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
    parse_time,
    progress,
    running_state,
    table,
)

if TYPE_CHECKING:
    from headrace_operations.controls.kinds import Control
    from headrace_operations.controls.report import Report
    from headrace_schemas import Experience
    from headrace_statistics.intervals import Mean

_RANGE_PANEL = "Experiences"


def controls(
    recording: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Read experiences from this output of `headrace replay events experiences` instead of the topic.",
            metavar="FILE",
            rich_help_panel=_RANGE_PANEL,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Oldest record: ISO 8601, or an age such as 90s, 5min, 2h, 7d.", rich_help_panel=_RANGE_PANEL
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(help="End time, exclusive.", rich_help_panel=_RANGE_PANEL)] = None,
    most: Annotated[
        int,
        typer.Option(
            min=1, max=16_384, help="Maximum number of experiences, newest first.", rich_help_panel=_RANGE_PANEL
        ),
    ] = 2048,
    only: Annotated[
        list[str] | None, typer.Option(help="Run only this control; may be repeated.", metavar="NAME")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Number of trainings of each control.")] = 2,
    plays: Annotated[
        int | None, typer.Option(min=2, help="Number of plays of audit tasks; default: registry.gate.audit_tasks.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="Override a setting; may be repeated.", metavar="SECTION.KEY=VALUE"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for controls.json and controls.png.")] = Path("reports"),
    config: Config = None,
    bus: Annotated[
        str | None, typer.Option(help="Address of the bus, unless `up` runs here.", metavar="HOST:PORT")
    ] = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Run control experiments: train on recorded traffic with shuffled, flipped or random rewards.

    Each control is a short training from the base on the same experiences, those of the first version in the range:
    with the true rewards, with shuffled, flipped and random rewards, with learning rate 0, and with each reward source
    alone. The gate program scores the resulting versions on audit tasks. Everything runs in a temporary folder on its
    own bus, and no version is served. Exit status 1 if a control has an unexpected result.
    """
    import asyncio
    import os
    import tempfile

    from headrace_operations.controls import report as plot
    from headrace_operations.controls import runner
    from headrace_operations.supervisor.overrides import Overrides, parse_assignments

    changed = parse_assignments(settings or [])
    overrides = Overrides(config, changed, os.environ)
    bus_address = bus or str(overrides.get("bus.address") or "")
    recorded_experiences = _read_experiences(recording, since, until, bus_address, data_dir)
    selected = runner.select_trainable(recorded_experiences, str(overrides.get("trainer.model") or "headrace"), most)
    with tempfile.TemporaryDirectory(prefix="headrace-controls-") as scratch:
        request = runner.Request(
            recording=selected,
            controls=_select_controls(selected.experiences, only),
            seeds=seeds,
            plays=plays or int(overrides.get("registry.gate.audit_tasks") or 200),
            scratch=Path(scratch),
            config=config,
            settings=changed,
            environ=os.environ,
        )
        with progress("reading") as tick:
            report = asyncio.run(runner.run(request, tick))
    _write_report(report, out, json=json)
    plot.draw_chart(report, out / "controls.png")
    if report.problems:
        raise typer.Exit(1)


def _read_experiences(
    recording: Path | None, since: str | None, until: str | None, bus: str, data_dir: Path | None
) -> list[Experience]:
    import asyncio

    from headrace.topics import Range
    from headrace_operations.controls.runner import from_bus, from_file

    if recording is not None:
        return from_file(recording)
    topic_range = Range("experiences", since=parse_time(since), until=parse_time(until))
    return asyncio.run(from_bus(bus or running_state(data_dir).bus, topic_range))


def _select_controls(experiences: Sequence[Experience], only: list[str] | None) -> list[Control]:
    from headrace.errors import UsageError
    from headrace_operations.controls.kinds import CONTROLS, only_source, reward_sources

    sources = reward_sources(experiences)
    available = [*CONTROLS, *(only_source(source) for source in sources if len(sources) > 1)]
    unknown = sorted(set(only or ()) - {control.name for control in available})
    if unknown:
        names = ", ".join(control.name for control in available)
        raise UsageError(f"--only {unknown[0]}: is not a control; the controls are {names}")
    return [control for control in available if not only or control.name in only]


def _write_report(report: Report, folder: Path, *, json: bool) -> None:
    import json as encoder

    text = encoder.dumps(report.as_json(), indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "controls.json").write_text(text + "\n", encoding="utf-8")
    if json:
        echo_json(text)
        return
    rows = [("base", _number(report.base), "", "")]
    rows += [(row.control.name, _number(row.score), row.gain_text, row.verdict) for row in report.rows]
    title = f"{report.experiences} experiences, ± one standard error"
    console().print(table(["control", "held-out score>", "gain>", "against the base"], rows, title))
    console().print(f"sampled by {report.version}, which must be trainer.base")
    if report.later:
        console().print(f"left out: {report.later} experiences of later versions, which teach with any reward")
    for problem in report.problems:
        console().print(f"[red]unexpected[/]: {problem}")
    for advice in report.advice:
        console().print(f"[yellow]suggestion[/]: {advice}")


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
