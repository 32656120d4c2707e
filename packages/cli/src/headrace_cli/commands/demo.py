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
    folder: Annotated[Path, typer.Argument(help="Folder with a demo.toml.")] = Path("examples/email_agent"),
    seed: Annotated[int, typer.Option(help="Seed of the tasks, the base model, the agent and the trainer.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="Stop at a smaller goal.")] = False,
    signal: Annotated[
        str | None,
        typer.Option(help="Kind of user feedback, one of the demo's [signals]: edits, corrections, thumbs or rewards."),
    ] = None,
    traffic_s: Annotated[
        float | None, typer.Option(min=1.0, help="Maximum time of the agent's work in seconds; default: the demo's.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Data directory to keep; default: a temporary one.")] = None,
    cache: Annotated[Path, typer.Option(help="Folder in which the base model is cached.")] = Path(".cache/demo"),
    out: Annotated[Path, typer.Option(help="Folder of the report and its chart.")] = Path("reports"),
    name: Annotated[str, typer.Option(help="Name of the report: NAME.json, and NAME.png for a single seed.")] = "demo",
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Number of seeds, from --seed on, whose medians must keep the promises."),
    ] = None,
    settings: Overridden = None,
    pythons: Pythons = None,
) -> None:
    """Watch an agent improve from its own calls, on this machine, without a GPU or an API key.

    Builds a tiny base model, starts every service, lets the agent work through the gateway, and scores each new version
    on held-out tasks before it takes over. Exit status 1 if the agent did not reach the goal.
    """
    from headrace_cli.demo import recipe
    from headrace_cli.demo.performance import Options
    from headrace_operations.supervisor.overrides import parse_assignments
    from headrace_operations.supervisor.plan import parse_pythons

    demo_recipe = recipe.read(folder)
    if signal is not None:
        demo_recipe = demo_recipe.with_signal(signal)
    goal = demo_recipe.short if short else demo_recipe.goal
    if traffic_s is not None:
        goal = goal.model_copy(update={"traffic_s_max": traffic_s})
    overrides = parse_assignments(settings or [])
    folders = cache.absolute(), out.absolute()
    options = Options(seed, goal, data_dir or Path(), *folders, overrides, parse_pythons(pythons or []))
    keep, path = data_dir is not None, out / f"{name}.json"
    if seeds is None:
        reached_goal = _play_one_seed(demo_recipe, options, keep=keep, path=path)
    else:
        reached_goal = _play_seeds(seeds, demo_recipe, options, keep=keep, path=path)
    if not reached_goal:
        raise typer.Exit(1)


def _play_one_seed(recipe: Recipe, options: Options, *, keep: bool, path: Path) -> bool:
    """Play one seed and draw its chart."""
    from headrace_cli.demo import plot
    from headrace_cli.demo.console_reporter import ConsoleReporter

    reporter = ConsoleReporter(console())
    report = _play(recipe, options, reporter, keep=keep)
    report.write(path)
    has_chart = plot.draw(report, recipe.title, path.with_suffix(".png"))
    shortfalls = report.shortfalls(options.goal)
    reporter.print_summary(report, shortfalls)
    reporter.table(recipe, [report])
    reporter.print_example(report.shown)
    files = [path, *([path.with_suffix(".png")] if has_chart else [])]
    console().print(f"[dim]written: {', '.join(map(str, files))}[/]")
    return not shortfalls


def _play_seeds(count: int, recipe: Recipe, options: Options, *, keep: bool, path: Path) -> bool:
    """Play the seeds one after the other, each with its own services, and write the report after each."""
    from headrace_cli.demo.console_reporter import ConsoleReporter
    from headrace_cli.demo.seeds import SeedsReport

    reports: list[Report] = []
    for seed in range(options.seed, options.seed + count):
        reporter = ConsoleReporter(console())
        seed_dir = options.data_dir / f"seed-{seed}"
        reports.append(_play(recipe, replace(options, seed=seed, data_dir=seed_dir), reporter, keep=keep))
        reporter.print_summary(reports[-1], [])
        reporter.table(recipe, reports[-1:])
        seeds_report = SeedsReport.of(recipe, options.goal, reports)
        seeds_report.write(path)
    reporter.print_example(reports[0].shown)
    if count > 1:
        reporter.table(recipe, reports)
    reporter.print_promises(seeds_report)
    console().print(f"[dim]written: {path}[/]")
    return seeds_report.holds


def _play(recipe: Recipe, options: Options, reporter: ConsoleReporter, *, keep: bool) -> Report:
    """Play one seed. `keep` keeps the data of the services in `options.data_dir`."""
    import asyncio
    import shutil
    import tempfile

    from headrace_cli.demo.runner import play

    data_dir = options.data_dir if keep else Path(tempfile.mkdtemp(prefix="headrace-demo-"))
    try:
        return asyncio.run(play(recipe, replace(options, data_dir=data_dir), reporter))
    finally:
        if not keep:
            shutil.rmtree(data_dir, ignore_errors=True)


def add_to(app: typer.Typer) -> None:
    examples = (
        "--seed 7",
        "--signal edits --short",
        "examples/email_agent --data-dir kept",
        "examples/math_agent --seeds 5",
        "examples/werewolf --seeds 1",
    )
    command(app, demo, "headrace demo", *(f"headrace demo {example}" for example in examples))
