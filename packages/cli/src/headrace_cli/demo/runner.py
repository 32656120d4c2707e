"""Runs a demo from the base model to the report."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from headrace_cli.demo import checks, opponents
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_cli.demo.measures import BeforeAfter, MeasuredPlays, PromisedLine
from headrace_cli.demo.performance import Options, Performance, StackAddress, command_environment, service_environment
from headrace_cli.demo.recipe import Recipe
from headrace_cli.demo.report import Report, ShownTask, VersionScore
from headrace_cli.demo.watch import Watch
from headrace_operations.errors import StartFailed
from headrace_operations.from_topics import read_turn_account
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides


async def play(
    recipe: Recipe,
    options: Options,
    reporter: ConsoleReporter,
    finish: Callable[[Report, StackAddress], Awaitable[None]] | None = None,
) -> Report:
    """Run a demo. All processes are stopped at the end.

    Args:
        finish: called with the report while the services still run.

    Raises:
        StartFailed: a service, the base model or the agent could not start.
    """
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
        environ=service_environment(recipe),
        report=reporter.print_event,
    )
    try:
        with reporter.doing("starting the services"):
            supervisor.start()
            await asyncio.to_thread(supervisor.wait_up)
        stack = StackAddress(supervisor.plan.bus, supervisor.url("gateway"))
        all_settings = {**settings, "data_dir": options.data_dir}
        environ = Overrides(recipe.folder / recipe.config, all_settings, service_environment(recipe)).environ
        for name, opponent in recipe.models.items():
            with reporter.doing(f"registering {name}"):
                await opponents.register(supervisor.url("registry"), name, Path(base), opponent.label, environ)
        report = await perform(recipe, options, stack, reporter)
        report = replace(report, wall_s=round(time.monotonic() - began, 1))
        if finish is not None:
            await finish(report, stack)
    finally:
        with reporter.doing("stopping the services"):
            await asyncio.to_thread(supervisor.stop)
    return report


async def perform(recipe: Recipe, options: Options, stack: StackAddress, reporter: ConsoleReporter) -> Report:
    """Run the demo with a running Headrace: the first version, the agent, the account."""
    began = time.monotonic()
    checks_result = await asyncio.to_thread(_run_checks, recipe, options)
    watch = Watch(stack.bus, recipe.model, reporter.print_decision)
    async with _run_watch(watch):
        performance = Performance(recipe, options, stack, reporter, watch)
        result = await (performance.run_with_gate() if recipe.rows is None else performance.run_rows(recipe.rows))
    account = await read_turn_account(stack.bus)
    return Report(
        before=result.before.mean("score"),
        after=result.after.mean("score"),
        measures={
            name: BeforeAfter(result.before.mean(measure.field), result.after.mean(measure.field))
            for name, measure in recipe.measures.items()
        },
        shown=_example(recipe, result.before, result.after),
        versions=_versions(watch, result.traffic_began),
        failed_requests=result.failed_requests,
        requests=result.requests,
        swaps=watch.swaps,
        wall_s=round(time.monotonic() - began, 1),
        traffic_s=round(result.traffic_s, 1),
        seed=options.seed,
        rows=result.rows,
        checks=checks_result,
        **Report.account(account),  # type: ignore[arg-type]
    )


def _run_checks(recipe: Recipe, options: Options) -> tuple[PromisedLine, ...]:
    return checks.run(recipe.command("checks", options.values), command_environment(recipe)) if recipe.checks else ()


def _example(recipe: Recipe, before: MeasuredPlays, after: MeasuredPlays) -> ShownTask | None:
    """Return the texts of the first task by name, so that no task is preferred."""
    if recipe.shown is None:
        return None
    first, last = before.texts_by_task(recipe.shown), after.texts_by_task(recipe.shown)
    task = min(first.keys() & last.keys(), default=None)
    return None if task is None else ShownTask(task, first[task], last[task])


def _versions(watch: Watch, traffic_began: float) -> tuple[VersionScore, ...]:
    """Return the versions in the order of their decisions. Refused versions have no score, as they never served."""
    decisions: list[tuple[datetime, str, float | None, bool]] = [
        (scored.time, scored.version, scored.score, scored.version in watch.champions)
        for scored in watch.scores.values()
    ]
    decisions += [
        (time, version, None, False) for version, time in watch.rejected.items() if version not in watch.scores
    ]
    return tuple(
        VersionScore(
            version, score, max(0.0, time.timestamp() - traffic_began), promoted, watch.takeover_s.get(version)
        )
        for time, version, score, promoted in sorted(decisions, key=lambda decision: decision[0])
    )


def _build_base(recipe: Recipe, values: Mapping[str, object]) -> str:
    command = recipe.command("base", values)
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=command_environment(recipe), check=False)
    folder = next((line for line in reversed(result.stdout.split("\n")) if line.strip()), "")
    if result.returncode or not Path(folder).is_dir():
        raise StartFailed(f"the base model was not built: exit status {result.returncode}, last line {folder!r}")
    return folder


@contextlib.asynccontextmanager
async def _run_watch(watch: Watch) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
