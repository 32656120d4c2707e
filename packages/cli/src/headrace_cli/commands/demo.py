"""`headrace demo`."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import Overridden, Pythons, command, console, echo

if TYPE_CHECKING:
    from headrace_cli.demo.console_reporter import ConsoleReporter
    from headrace_cli.demo.demo_run import Options, StackAddress
    from headrace_cli.demo.recipe import Recipe
    from headrace_cli.demo.report import Report

DATA_DIR = Path(".headrace/demo")
"""Data directory of the last demo."""
CONTAINER = "CONTAINER_RUN"
"""Environment variable of deploy/all.Dockerfile: the options with which a user runs its image on the same data."""
_IMAGE = "headrace"
"""Tag of the image, as deploy/README.md builds it."""


def demo(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder with a demo.toml; default: the e-mail agent of headrace-demo.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks, the base model, the agent and the trainer.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="Stop at a smaller goal.")] = False,
    signal: Annotated[
        str | None,
        typer.Option(help="Kind of user feedback, one of the demo's [signals]: edits, corrections, thumbs or rewards."),
    ] = None,
    traffic_s: Annotated[
        float | None, typer.Option(min=1.0, help="Time of the agent's work in seconds instead of the demo's tasks.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Data directory; default: .headrace/demo, which is emptied, or temporary with --seeds."),
    ] = None,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Leave the services running after the demo, until Ctrl-C.")
    ] = False,
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
    from headrace.errors import UsageError
    from headrace_cli.demo import recipe
    from headrace_cli.demo.demo_run import Options
    from headrace_operations.supervisor.overrides import parse_assignments
    from headrace_operations.supervisor.plan import parse_pythons

    if keep_running and seeds is not None:
        raise UsageError("--keep-running: has no effect with --seeds, which plays several demos; leave one of them out")
    demo_recipe = recipe.read(folder or recipe.default_folder())
    if signal is not None:
        demo_recipe = demo_recipe.with_signal(signal)
    goal = demo_recipe.short if short else demo_recipe.goal
    if traffic_s is not None:
        goal = goal.model_copy(update={"traffic_s_max": traffic_s, "tasks": 0})
    overrides = parse_assignments(settings or [])
    folders = cache.absolute(), out.absolute()
    options = Options(seed, goal, data_dir or Path(), *folders, overrides, parse_pythons(pythons or []))
    path = out / f"{name}.json"
    if seeds is None:
        if data_dir is None:
            options = replace(options, data_dir=_empty_data_dir(DATA_DIR))
        reached_goal = _play_one_seed(demo_recipe, options, keep_running=keep_running, path=path)
    else:
        reached_goal = _play_seeds(seeds, demo_recipe, options, keep=data_dir is not None, path=path)
    if not reached_goal:
        raise typer.Exit(1)


def _empty_data_dir(data_dir: Path) -> Path:
    """Delete the data of an earlier demo, and return the directory. Raises `UsageError` if services still run on it."""
    import shutil

    from headrace_operations.supervisor.state import Lock

    lock = Lock(data_dir.absolute())
    lock.take()
    lock.release()
    shutil.rmtree(data_dir)
    return data_dir


def _play_one_seed(recipe: Recipe, options: Options, *, keep_running: bool, path: Path) -> bool:
    """Run the demo with one seed, draw its chart, and print commands with which the user can continue."""
    import asyncio

    from headrace_cli.demo import report as plot
    from headrace_cli.demo.console_reporter import ConsoleReporter
    from headrace_cli.demo.runner import play

    reporter, reached_goal = ConsoleReporter(console()), False

    async def finish(report: Report, stack: StackAddress) -> None:
        nonlocal reached_goal
        report.write(path)
        has_chart = plot.draw_chart(report, recipe.title, path.with_suffix(".png"))
        shortfalls = report.shortfalls(options.goal)
        reached_goal = not shortfalls
        reporter.print_summary(report, shortfalls)
        reporter.print_table(recipe, [report])
        reporter.print_example(report.shown)
        files = [path, *([path.with_suffix(".png")] if has_chart else [])]
        console().print(f"[dim]written: {', '.join(map(str, files))}; data of the services: {options.data_dir}[/]")
        if keep_running:
            if stack.console:
                reporter.print_console(stack.console, options.data_dir)
            console().print(f"base_url  [bold green]{stack.base_url}[/]\n[dim]Ctrl-C stops the services[/]")
            await _wait_for_interrupt()

    asyncio.run(play(recipe, options, reporter, finish))
    _print_next(recipe, options)
    return reached_goal


async def _wait_for_interrupt() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    import asyncio
    import signal

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def _print_next(recipe: Recipe, options: Options) -> None:
    """Print three commands with which the user can continue after the demo."""
    data_dir, config = shlex.quote(str(options.data_dir)), shlex.quote(str(recipe.folder / recipe.config))
    variable = f"PYTHONPATH={shlex.quote(str(recipe.folder.parent))}"
    program = shlex.quote(sys.argv[0])
    serve = f"{variable} {program}"
    if container := os.environ.get(CONTAINER):  # the user's shell is outside
        program, serve = f"{container} {_IMAGE}", f"{container} --network host -e {variable} {_IMAGE}"
    commands = {
        "serve what the agent has learned, until Ctrl-C": (
            f"{serve} up --data-dir {data_dir} --config {config} --auto-ports"
        ),
        "see what the trainer did": f"{program} logs trainer --data-dir {data_dir}",
        "list the settings for an agent of your own": f"{program} config reference --tier common",
    }
    for purpose, text in commands.items():
        console().print(f"[dim]{purpose}:[/]")
        echo(f"  {text}")


def _play_seeds(count: int, recipe: Recipe, options: Options, *, keep: bool, path: Path) -> bool:
    """Run the demo once for each seed, each time with its own services, and update the report after each run."""
    from headrace_cli.demo.console_reporter import ConsoleReporter
    from headrace_cli.demo.report import SeedsReport

    reports: list[Report] = []
    for seed in range(options.seed, options.seed + count):
        reporter = ConsoleReporter(console())
        seed_dir = options.data_dir / f"seed-{seed}"
        reports.append(_play(recipe, replace(options, seed=seed, data_dir=seed_dir), reporter, keep=keep))
        reporter.print_summary(reports[-1], [])
        reporter.print_table(recipe, reports[-1:])
        seeds_report = SeedsReport.of(recipe, options.goal, reports)
        seeds_report.write(path)
    reporter.print_example(reports[0].shown)
    if count > 1:
        reporter.print_table(recipe, reports)
    reporter.print_promises(seeds_report)
    console().print(f"[dim]written: {path}[/]")
    return seeds_report.holds


def _play(recipe: Recipe, options: Options, reporter: ConsoleReporter, *, keep: bool) -> Report:
    """Run the demo once, with one seed, and return its report.

    Args:
        keep: whether the data of the services in `options.data_dir` remains after the demo.
    """
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
        "--keep-running",
        "examples/email_agent --data-dir kept",
        "examples/math_agent --seeds 5",
        "examples/werewolf --seeds 1",
    )
    command(app, demo, "headrace demo", *(f"headrace demo {example}" for example in examples))
