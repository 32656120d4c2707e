"""`headrace demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.shared import Overridden, Pythons, command, console


def demo(
    folder: Annotated[Path, typer.Argument(help="A folder with a demo.toml.")] = Path("examples/email_agent"),
    seed: Annotated[int, typer.Option(help="Of the world, the base model, the agent and the trainer.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="A smaller goal, for a quick look.")] = False,
    signal: Annotated[
        str | None,
        typer.Option(help="What the users say, one of the demo's [signals]: edits, corrections, thumbs or rewards."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keep everything here; default: a folder that is removed at the end.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where the base model is kept for the next run.")] = Path(".cache/demo"),
    out: Annotated[Path, typer.Option(help="Where demo.json and demo.png go.")] = Path("reports"),
    settings: Overridden = None,
    pythons: Pythons = None,
) -> None:
    """Watch an agent get better from its own calls, on this machine, with no GPU and no key.

    Builds a tiny base model, starts every service, lets the agent work through the gateway, and plays held-out tasks
    against each new version before it takes over. Exits with 1 when the agent did not get better as promised.
    """
    import asyncio
    import shutil
    import tempfile

    from headrace_cli.demo import plot, recipe
    from headrace_cli.demo.console_reporter import ConsoleReporter
    from headrace_cli.demo.runner import Options, play
    from headrace_cli.supervisor.overrides import parse_assignments
    from headrace_cli.supervisor.plan import parse_pythons

    found = recipe.read(folder)
    if signal is not None:
        found = found.with_signal(signal)
    place = data_dir or Path(tempfile.mkdtemp(prefix="headrace-demo-"))
    goal = found.short if short else found.goal
    reporter = ConsoleReporter(console())
    given = parse_assignments(settings or [])
    options = Options(seed, goal, place, cache.absolute(), out.absolute(), given, parse_pythons(pythons or []))
    try:
        report = asyncio.run(play(found, options, reporter))
    finally:
        if data_dir is None:
            shutil.rmtree(place, ignore_errors=True)
    report.write(out / "demo.json")
    drawn = plot.draw(report, found.title, out / "demo.png")
    shortfalls = report.shortfalls(goal)
    reporter.ended(report, shortfalls)
    written = [out / "demo.json", *([out / "demo.png"] if drawn else [])]
    console().print(f"[dim]written: {', '.join(map(str, written))}[/]")
    if shortfalls:
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    examples = "--seed 7", "--signal edits --short", "examples/email_agent --data-dir kept"
    command(app, demo, "headrace demo", *(f"headrace demo {one}" for one in examples))
