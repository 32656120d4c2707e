"""Runs a demo from building the base model to the report, with its checks, its opponents and its agent."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from headrace.registry import ModelRegistry
from headrace_cli.demo.console_reporter import ConsoleReporter, Watch
from headrace_cli.demo.demo_run import DemoRun, Options, StackAddress, command_environment, service_environment
from headrace_cli.demo.measures import BeforeAfter, CheckResult, MeasuredPlays
from headrace_cli.demo.recipe import Recipe
from headrace_cli.demo.report import Report, ShownTask, VersionScore
from headrace_operations import catalog
from headrace_operations.from_topics import read_turn_account
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.state import StartFailed
from headrace_schemas.programs import StoredLine

_CHECKS_S_MAX = 120.0
_LINE: TypeAdapter[CheckResult] = TypeAdapter(CheckResult)


def run_recipe_checks(command: Sequence[str], environ: Mapping[str, str]) -> tuple[CheckResult, ...]:
    """Run the recipe's command for checks, and return the check results that it prints, one for each line.

    Raises:
        StartFailed: the program failed or printed something else.
    """
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, env=environ, timeout=_CHECKS_S_MAX, check=True)
        return tuple(_LINE.validate_json(line) for line in result.stdout.splitlines() if line.strip())
    except (subprocess.SubprocessError, ValidationError) as error:
        raise StartFailed(f"the checks of the demo did not run: {error}") from None


_SERVED_S_MAX = 120.0
_POLL_S = 0.2
_WHY = "plays beside the agent, and stays as it is"


async def register_opponents(registry: str, name: str, folder: Path, label: str, environ: Mapping[str, str]) -> str:
    """Register a folder as the pinned champion of model `name`, and return its version once it is served.

    Args:
        registry: URL of the registry.
        name: model name.
        folder: absolute path of the model.
        label: label of the version.
        environ: environment with the settings of the services.

    Raises:
        HeadraceError: the version could not be registered, or not served in time.
    """
    stored = await catalog.store_folder(folder, name, None, environ)
    await asyncio.to_thread(_pin, registry, name, label, stored)
    return stored.version


def _pin(registry: str, name: str, label: str, stored: StoredLine) -> None:
    with ModelRegistry(registry, who="headrace demo") as api:
        catalog.register(api, stored, label=label, serve=True, why=_WHY)
        _wait_champion(api, name, stored.version)
        api.pin(name, stored.version, reason=_WHY)


def _wait_champion(api: ModelRegistry, name: str, version: str) -> None:
    """Wait until replicas have loaded and probed the version and it is champion."""
    deadline = time.monotonic() + _SERVED_S_MAX
    while (champion := api.model(name).champion) != version:
        if time.monotonic() > deadline:
            raise StartFailed(f"{version} does not serve after {_SERVED_S_MAX:g} s (champion: {champion})")
        time.sleep(_POLL_S)


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
    with reporter.show_activity("building the base model", with_its_own_bar=True):
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
        with reporter.show_activity("starting the services"):
            supervisor.start()
            state = await asyncio.to_thread(supervisor.wait_up)
        console = state.services["console"].url if "console" in state.services else ""
        stack = StackAddress(supervisor.plan.bus, supervisor.url("gateway"), console)
        if console:
            reporter.print_console(console, options.data_dir)
        all_settings = {**settings, "data_dir": options.data_dir}
        environ = Overrides(recipe.folder / recipe.config, all_settings, service_environment(recipe)).environ
        for name, opponent in recipe.models.items():
            with reporter.show_activity(f"registering {name}"):
                await register_opponents(supervisor.url("registry"), name, Path(base), opponent.label, environ)
        report = await run_on_stack(recipe, options, stack, reporter)
        report = replace(report, wall_s=round(time.monotonic() - began, 1))
        if finish is not None:
            await finish(report, stack)
    finally:
        with reporter.show_activity("stopping the services"):
            await asyncio.to_thread(supervisor.stop)
    return report


async def run_on_stack(recipe: Recipe, options: Options, stack: StackAddress, reporter: ConsoleReporter) -> Report:
    """Run the demo on a running Headrace: measure the first version, run the agent, and return the report."""
    began = time.monotonic()
    checks_result = await asyncio.to_thread(_run_checks, recipe, options)
    watch = Watch(stack.bus, recipe.model, reporter.print_decision)
    async with _run_watch(watch):
        run = DemoRun(recipe, options, stack, reporter, watch)
        result = await (run.run_with_gate() if recipe.rows is None else run.run_rows(recipe.rows))
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


def _run_checks(recipe: Recipe, options: Options) -> tuple[CheckResult, ...]:
    return (
        run_recipe_checks(recipe.command("checks", options.values), command_environment(recipe))
        if recipe.checks
        else ()
    )


def _example(recipe: Recipe, before: MeasuredPlays, after: MeasuredPlays) -> ShownTask | None:
    """Return the shown texts of both versions for the first task by name, so that the choice favours no version."""
    if recipe.shown is None:
        return None
    first, last = before.texts_by_task(recipe.shown), after.texts_by_task(recipe.shown)
    task = min(first.keys() & last.keys(), default=None)
    return None if task is None else ShownTask(task, first[task], last[task])


def _versions(watch: Watch, traffic_began: float) -> tuple[VersionScore, ...]:
    """Return the versions in the order of the registry's decisions.

    Refused versions have no score, as they never served.
    """
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
