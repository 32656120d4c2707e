"""`headrace demo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import Overridden, Pythons, command, console

if TYPE_CHECKING:
    from headrace_cli.demo.console_reporter import ConsoleReporter
    from headrace_cli.demo.performance import Options
    from headrace_cli.demo.recipe import Recipe
    from headrace_cli.demo.report import Report


def demo(
    folder: Annotated[Path, typer.Argument(help="A folder with a demo.toml.")] = Path("examples/email_agent"),
    seed: Annotated[int, typer.Option(help="Of the world, the base model, the agent and the trainer.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="A smaller goal, for a quick look.")] = False,
    signal: Annotated[
        str | None,
        typer.Option(help="What the users say, one of the demo's [signals]: edits, corrections, thumbs or rewards."),
    ] = None,
    traffic_s: Annotated[
        float | None, typer.Option(min=1.0, help="How long the agent works at most; default: what the demo says.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keep everything here; default: a folder that is removed at the end.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where the base model is kept for the next run.")] = Path(".cache/demo"),
    out: Annotated[Path, typer.Option(help="Where the report and its picture go.")] = Path("reports"),
    name: Annotated[str, typer.Option(help="Of the report: NAME.json, and NAME.png of a single seed.")] = "demo",
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Play so many seeds from --seed on, and hold medians to what is promised."),
    ] = None,
    settings: Overridden = None,
    pythons: Pythons = None,
) -> None:
    """Watch an agent get better from its own calls, on this machine, with no GPU and no key.

    Builds a tiny base model, starts every service, lets the agent work through the gateway, and plays held-out tasks
    against each new version before it takes over. Exits with 1 when the agent did not get better as promised.
    """
    from headrace_cli.demo import recipe
    from headrace_cli.demo.performance import Options
    from headrace_operations.supervisor.overrides import parse_assignments
    from headrace_operations.supervisor.plan import parse_pythons

    found = recipe.read(folder)
    if signal is not None:
        found = found.with_signal(signal)
    goal = found.short if short else found.goal
    if traffic_s is not None:
        goal = goal.model_copy(update={"traffic_s_max": traffic_s})
    given = parse_assignments(settings or [])
    places = cache.absolute(), out.absolute()
    options = Options(seed, goal, data_dir or Path(), *places, given, parse_pythons(pythons or []))
    keep, path = data_dir is not None, out / f"{name}.json"
    if seeds is None:
        good = _one(found, options, keep=keep, path=path)
    else:
        good = _several(seeds, found, options, keep=keep, path=path)
    if not good:
        raise typer.Exit(1)


def _one(recipe: Recipe, options: Options, *, keep: bool, path: Path) -> bool:
    """Play one seed, and draw it."""
    from headrace_cli.demo import plot
    from headrace_cli.demo.console_reporter import ConsoleReporter

    reporter = ConsoleReporter(console())
    report = _played(recipe, options, reporter, keep=keep)
    report.write(path)
    drawn = plot.draw(report, recipe.title, path.with_suffix(".png"))
    shortfalls = report.shortfalls(options.goal)
    reporter.ended(report, shortfalls)
    reporter.table(recipe, [report])
    reporter.showed(report.shown)
    written = [path, *([path.with_suffix(".png")] if drawn else [])]
    console().print(f"[dim]written: {', '.join(map(str, written))}[/]")
    return not shortfalls


def _several(count: int, recipe: Recipe, options: Options, *, keep: bool, path: Path) -> bool:
    """Play the seeds one after the other, each on services of its own. What is done is written after each."""
    from headrace_cli.demo.console_reporter import ConsoleReporter
    from headrace_cli.demo.seeds import SeedsReport

    reports: list[Report] = []
    for seed in range(options.seed, options.seed + count):
        reporter = ConsoleReporter(console())
        place = options.data_dir / f"seed-{seed}"
        reports.append(_played(recipe, replace(options, seed=seed, data_dir=place), reporter, keep=keep))
        reporter.ended(reports[-1], [])
        reporter.table(recipe, reports[-1:])
        found = SeedsReport.of(recipe, options.goal, reports)
        found.write(path)
    reporter.showed(reports[0].shown)
    if count > 1:
        reporter.table(recipe, reports)
    reporter.held(found)
    console().print(f"[dim]written: {path}[/]")
    return found.holds


def _played(recipe: Recipe, options: Options, reporter: ConsoleReporter, *, keep: bool) -> Report:
    """One seed; `keep` leaves what the services wrote in `options.data_dir`."""
    import asyncio
    import shutil
    import tempfile

    from headrace_cli.demo.runner import play

    place = options.data_dir if keep else Path(tempfile.mkdtemp(prefix="headrace-demo-"))
    try:
        return asyncio.run(play(recipe, replace(options, data_dir=place), reporter))
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def add_to(app: typer.Typer) -> None:
    examples = (
        "--seed 7",
        "--signal edits --short",
        "examples/email_agent --data-dir kept",
        "examples/math_agent --seeds 5",
        "examples/werewolf --seeds 1",
    )
    command(app, demo, "headrace demo", *(f"headrace demo {one}" for one in examples))
