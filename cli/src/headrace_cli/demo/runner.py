"""Plays a demo from the base model to the report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.stack.connection import Addresses, Stack
from headrace_cli.demo import agent
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_cli.demo.measures import BeforeAfter, MeasuredPlays
from headrace_cli.demo.recipe import Goal, Recipe
from headrace_cli.demo.report import Report, ShownTask, VersionScore
from headrace_cli.demo.rows import Row
from headrace_cli.demo.watch import Watch
from headrace_cli.errors import StartFailed
from headrace_cli.from_topics import read_turn_account
from headrace_cli.supervisor import Supervisor
from headrace_runtime.parent_death import bound_to_parent

_FIRST_VERSION_S_MAX = 300.0
"""An engine core of vLLM takes a minute to start on two quiet cores."""
_LAST_AUDIT_S_MAX = 60.0
_MEASURE_S_MAX = 120.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller chooses."""

    seed: int
    goal: Goal
    data_dir: Path
    cache: Path
    out: Path
    settings: Mapping[str, object]
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreters of services that are in environments of their own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where Headrace runs, whoever started it."""

    bus: str
    gateway: str
    """Root of its HTTP."""

    @property
    def base_url(self) -> str:
        return f"{self.gateway}/v1"


async def play(recipe: Recipe, options: Options, reporter: ConsoleReporter) -> Report:
    """The whole demo; raises `StartFailed` when something cannot even begin. Nothing is left running."""
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    with reporter.doing("building the base model", with_its_own_bar=True):
        base = await asyncio.to_thread(_build_base, recipe, _values(options))
    settings = {**recipe.settings, "trainer.base": base, "trainer.seed": options.seed, **options.settings}
    supervisor = Supervisor(
        options.data_dir,
        config=recipe.folder / recipe.config,
        settings=settings,
        auto_ports=True,
        pythons=options.pythons,
        environ=_environ(recipe),
        report=reporter.happened,
    )
    try:
        with reporter.doing("starting the services"):
            supervisor.start()
            await asyncio.to_thread(supervisor.wait_up)
        place = Place(supervisor.plan.bus, supervisor.url("gateway"))
        report = await perform(recipe, options, place, reporter)
    finally:
        with reporter.doing("stopping the services"):
            await asyncio.to_thread(supervisor.stop)
    return replace(report, wall_s=round(time.monotonic() - began, 1))


async def perform(recipe: Recipe, options: Options, place: Place, reporter: ConsoleReporter) -> Report:
    """What follows once Headrace runs at `place`: the first version, the agent at work, the account."""
    began = time.monotonic()
    watch = Watch(place.bus, reporter.decided)
    async with _running(watch):
        with reporter.doing("loading, probing and evaluating the first version"):
            await _first_version(watch)
        with reporter.doing("measuring it as the last one will be"):
            before = after = await _measured(recipe, options, place, watch.champions[0])
        traffic_began, traffic_s, summary = time.time(), 0.0, Counter[str]()
        rows = [_row(recipe, 0, watch, before)]
        for stretch in recipe.stretches:
            left_s = options.goal.traffic_s_max - traffic_s
            if left_s <= 0:
                break
            stretch_began = time.monotonic()
            summary += await _agent_at_work(recipe, options, place, watch, reporter, stretch, left_s)
            traffic_s += time.monotonic() - stretch_began
            with reporter.doing("waiting until the last version is measured"):
                if recipe.rows is not None:
                    await _seen(watch, place, recipe.model)
                await _last_audit(watch)
            with reporter.doing("measuring the last version"):
                after = await _measured(recipe, options, place, watch.champions[-1])
            rows.append(_row(recipe, stretch.get("row", 0), watch, after))
    account = await read_turn_account(place.bus)
    return Report(
        before=before.mean("score"),
        after=after.mean("score"),
        measures={name: BeforeAfter(rows[0].measures[name], rows[-1].measures[name]) for name in recipe.measures},
        rows=tuple(rows) if recipe.rows is not None else (),
        shown=_shown(recipe, before, after),
        versions=_versions(watch, traffic_began),
        failed_requests=summary["failed_requests"],
        requests=summary["requests"],
        swaps=watch.swaps,
        wall_s=round(time.monotonic() - began, 1),
        traffic_s=round(traffic_s, 1),
        seed=options.seed,
        **Report.account(account),  # type: ignore[arg-type]
    )


async def _measured(recipe: Recipe, options: Options, place: Place, version: str) -> MeasuredPlays:
    """Its plays; the same tasks and seeds for every version. The registry's audit, with others, may have told the
    agent to stop: these chose nothing.
    """
    filled = {**_values(options), "base_url": place.base_url, "gateway": place.gateway, "version": version}
    command = bound_to_parent(recipe.command("measure", filled))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=_environ(recipe))
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _MEASURE_S_MAX)
    except TimeoutError:
        raise StartFailed(f"{version} was not measured within {_MEASURE_S_MAX:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    played = MeasuredPlays.read(output)
    if process.returncode or not played.lines:
        raise StartFailed(f"{version} was not measured: exit status {process.returncode}, {len(played.lines)} scores")
    return played


def _row(recipe: Recipe, at: int, watch: Watch, played: MeasuredPlays) -> Row:
    """Of what answers now."""
    found = {name: played.mean(measure.field) for name, measure in recipe.measures.items()}
    return Row(at, watch.champions[-1], found)


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
        VersionScore(version, score, max(0.0, time.timestamp() - traffic_began), promoted)
        for time, version, score, promoted in sorted(found, key=lambda one: one[0])
    )


def _values(options: Options) -> dict[str, object]:
    return {"cache": options.cache, "seed": options.seed, "out": options.out.absolute()}


def _build_base(recipe: Recipe, values: Mapping[str, object]) -> str:
    command = recipe.command("base", values)
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=_environ(recipe), check=False)
    folder = next((line for line in reversed(result.stdout.split("\n")) if line.strip()), "")
    if result.returncode or not Path(folder).is_dir():
        raise StartFailed(f"the base model was not built: exit status {result.returncode}, last line {folder!r}")
    return folder


async def _first_version(watch: Watch) -> None:
    async with _within(_FIRST_VERSION_S_MAX, "no version took over and was measured"):
        while not (watch.champions and watch.champions[0] in watch.scores):
            watch.changed.clear()
            await watch.changed.wait()


async def _agent_at_work(
    recipe: Recipe,
    options: Options,
    place: Place,
    watch: Watch,
    reporter: ConsoleReporter,
    stretch: Mapping[str, int],
    seconds_max: float,
) -> Counter[str]:
    """Let the agent work until it has shown enough; returns how many requests it made, and how many failed."""
    filled = {**_values(options), "base_url": place.base_url, "gateway": place.gateway, **stretch}
    deadline = time.monotonic() + seconds_max
    told = options.out / "agent.json"
    told.unlink(missing_ok=True)  # what an earlier stretch told is not this one's
    async with agent.at_work(recipe.command("agent", filled), _environ(recipe)) as process:
        with reporter.working(seconds_max) as update:
            while process.returncode is None and time.monotonic() < deadline and not _enough(watch, options.goal):
                update(watch)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 0.5)
    summary: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    return Counter({name: summary[name] for name in ("requests", "failed_requests")})


def _enough(watch: Watch, goal: Goal) -> bool:
    return watch.gain >= goal.enough_gain and watch.swaps >= goal.swaps_min


async def _seen(watch: Watch, place: Place, model: str) -> None:
    """Returns once the watch knows what answers: an agent that waits for its version may see it sooner."""
    stack = Stack(Addresses(gateway=place.gateway, bus=place.bus), model)
    try:
        async with asyncio.timeout(_LAST_AUDIT_S_MAX):
            while await asyncio.to_thread(stack.serving) != watch.champions[-1]:
                watch.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(watch.changed.wait(), 0.5)
    except TimeoutError:
        raise StartFailed(f"{model} means another version than {watch.champions[-1]}, which took over last") from None


async def _last_audit(watch: Watch) -> None:
    """A version is measured after it has taken over: the last one, too, before anything is reported of it."""
    async with _within(_LAST_AUDIT_S_MAX, f"{watch.champions[-1]} was not measured"):
        while watch.champions[-1] not in watch.scores:
            watch.changed.clear()
            await watch.changed.wait()


@contextlib.asynccontextmanager
async def _within(limit_s: float, failed: str) -> AsyncIterator[None]:
    """Raises `StartFailed` with what `failed`, after so long."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise StartFailed(
            f"{failed} within {limit_s:g} s; with --data-dir the services' logs stay, see `headrace logs`"
        ) from None


@contextlib.asynccontextmanager
async def _running(watch: Watch) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _environ(recipe: Recipe) -> dict[str, str]:
    """The demo's folder is importable as a package for its own commands and for reward functions."""
    paths = [str(recipe.folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
