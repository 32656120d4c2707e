"""Plays a demo from the base model to the report."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from headrace_cli.demo import checks, opponents
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_cli.demo.measures import BeforeAfter, MeasuredPlays, PromisedLine
from headrace_cli.demo.performance import Options, Performance, Place, environ_of, environ_of_commands
from headrace_cli.demo.recipe import Recipe
from headrace_cli.demo.report import Report, ShownTask, VersionScore
from headrace_cli.demo.watch import Watch
from headrace_operations.errors import StartFailed
from headrace_operations.from_topics import read_turn_account
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides


async def play(recipe: Recipe, options: Options, reporter: ConsoleReporter) -> Report:
    """The whole demo; raises `StartFailed` when something cannot even begin. Nothing is left running."""
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    with reporter.doing("building the base model", with_its_own_bar=True):
        base = await asyncio.to_thread(_build_base, recipe, options.values)
    settings = {**recipe.settings, "trainer.base": base, "trainer.seed": options.seed, **options.settings}
    supervisor = Supervisor(
        options.data_dir,
        config=recipe.folder / recipe.config,
        settings=settings,
        auto_ports=True,
        pythons=options.pythons,
        environ=environ_of(recipe),
        report=reporter.happened,
    )
    try:
        with reporter.doing("starting the services"):
            supervisor.start()
            await asyncio.to_thread(supervisor.wait_up)
        place = Place(supervisor.plan.bus, supervisor.url("gateway"))
        given = {**settings, "data_dir": options.data_dir}
        environ = Overrides(recipe.folder / recipe.config, given, environ_of(recipe)).environ
        for name, opponent in recipe.models.items():
            with reporter.doing(f"registering {name}"):
                await opponents.register(supervisor.url("registry"), name, Path(base), opponent.label, environ)
        report = await perform(recipe, options, place, reporter)
    finally:
        with reporter.doing("stopping the services"):
            await asyncio.to_thread(supervisor.stop)
    return replace(report, wall_s=round(time.monotonic() - began, 1))


async def perform(recipe: Recipe, options: Options, place: Place, reporter: ConsoleReporter) -> Report:
    """What follows once Headrace runs at `place`: the first version, the agent at work, the account."""
    began = time.monotonic()
    checked = await asyncio.to_thread(_checked, recipe, options)
    watch = Watch(place.bus, recipe.model, reporter.decided)
    async with _running(watch):
        performance = Performance(recipe, options, place, reporter, watch)
        done = await (performance.under_a_gate() if recipe.rows is None else performance.by_rows(recipe.rows))
    account = await read_turn_account(place.bus)
    return Report(
        before=done.before.mean("score"),
        after=done.after.mean("score"),
        measures={
            name: BeforeAfter(done.before.mean(measure.field), done.after.mean(measure.field))
            for name, measure in recipe.measures.items()
        },
        shown=_shown(recipe, done.before, done.after),
        versions=_versions(watch, done.traffic_began),
        failed_requests=done.failed_requests,
        requests=done.requests,
        swaps=watch.swaps,
        wall_s=round(time.monotonic() - began, 1),
        traffic_s=round(done.traffic_s, 1),
        seed=options.seed,
        rows=done.rows,
        checks=checked,
        **Report.account(account),  # type: ignore[arg-type]
    )


def _checked(recipe: Recipe, options: Options) -> tuple[PromisedLine, ...]:
    return checks.run(recipe.command("checks", options.values), environ_of_commands(recipe)) if recipe.checks else ()


def _shown(recipe: Recipe, before: MeasuredPlays, after: MeasuredPlays) -> ShownTask | None:
    """Of the task whose name comes first: nobody chose it."""
    if recipe.shown is None:
        return None
    first, last = before.shown(recipe.shown), after.shown(recipe.shown)
    task = min(first.keys() & last.keys(), default=None)
    return None if task is None else ShownTask(task, first[task], last[task])


def _versions(watch: Watch, traffic_began: float) -> tuple[VersionScore, ...]:
    """In the order in which they were decided about. Who was refused has no score: only who serves is measured."""
    found: list[tuple[datetime, str, float | None, bool]] = [
        (one.time, one.version, one.score, one.version in watch.champions) for one in watch.scores.values()
    ]
    found += [(time, version, None, False) for version, time in watch.rejected.items() if version not in watch.scores]
    return tuple(
        VersionScore(
            version, score, max(0.0, time.timestamp() - traffic_began), promoted, watch.takeover_s.get(version)
        )
        for time, version, score, promoted in sorted(found, key=lambda one: one[0])
    )


def _build_base(recipe: Recipe, values: Mapping[str, object]) -> str:
    command = recipe.command("base", values)
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ_of_commands(recipe), check=False)
    folder = next((line for line in reversed(result.stdout.split("\n")) if line.strip()), "")
    if result.returncode or not Path(folder).is_dir():
        raise StartFailed(f"the base model was not built: exit status {result.returncode}, last line {folder!r}")
    return folder


@contextlib.asynccontextmanager
async def _running(watch: Watch) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
