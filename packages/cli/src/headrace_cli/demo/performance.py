"""What a demo does while Headrace runs: measure the first version, have the agent work, measure what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace_cli.demo import agent
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_cli.demo.measures import MeasuredPlays
from headrace_cli.demo.recipe import Goal, Recipe
from headrace_cli.demo.rows import Row, RowsRecipe
from headrace_cli.demo.settled import Settling
from headrace_cli.demo.watch import Watch
from headrace_operations.errors import StartFailed
from headrace_runtime.parent_death import bound_to_parent
from headrace_runtime.program_environment import program_environment

_FIRST_VERSION_S_MAX = 300.0
"""An engine core of vLLM takes a minute to start on two quiet cores."""
_LAST_AUDIT_S_MAX = 60.0
_MEASURE_S_MAX = 600.0
_SETTLED_S_MAX = 120.0


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

    @property
    def values(self) -> dict[str, object]:
        """For the recipe's commands."""
        return {"cache": self.cache, "seed": self.seed, "out": self.out.absolute()}


@dataclass(frozen=True, slots=True)
class Place:
    """Where Headrace runs, whoever started it."""

    bus: str
    gateway: str
    """Root of its HTTP."""

    @property
    def base_url(self) -> str:
        return f"{self.gateway}/v1"


@dataclass(frozen=True, slots=True)
class Performed:
    """What was measured first and last, and how the agent fared in between."""

    before: MeasuredPlays
    after: MeasuredPlays
    requests: int
    failed_requests: int
    traffic_began: float
    """Unix time."""
    traffic_s: float
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class Performance:
    """One of a recipe, at one place."""

    recipe: Recipe
    options: Options
    place: Place
    reporter: ConsoleReporter
    watch: Watch

    async def under_a_gate(self) -> Performed:
        """The agent works until the registry's audit says that it is enough."""
        with self.reporter.doing("loading, probing and evaluating the first version"):
            await self._first_version(lambda: self.watch.champions[0] in self.watch.scores)
        with self.reporter.doing("measuring it as the last one will be"):
            before = await self._measured(self.watch.champions[0])
        began = time.time()
        summary = await self._agent_at_work({}, self.options.goal.traffic_s_max)
        traffic_s = time.time() - began
        with self.reporter.doing("waiting until the last version is measured"):
            await self._last_audit()
        with self.reporter.doing("measuring the last version"):
            after = await self._measured(self.watch.champions[-1])
        return Performed(before, after, summary["requests"], summary["failed_requests"], began, traffic_s)

    async def by_rows(self, rows: RowsRecipe) -> Performed:
        """The agent works from row to row. Each measures what serves once all before it is trained."""
        with self.reporter.doing("loading and probing the first version"):
            await self._first_version(lambda: True)
        began = time.time()
        first, row = await self._row(rows, 0, [])
        done = Performed(first, first, 0, 0, began, 0.0, (row,))
        settling = Settling(self.place.bus, self.recipe.model)
        for before, at in rows.stretches:
            worked = time.monotonic()
            left_s = self.options.goal.traffic_s_max - done.traffic_s
            summary = await self._agent_at_work({"row_before": before, "row": at}, left_s)
            traffic_s = done.traffic_s + time.monotonic() - worked
            with self.reporter.doing("waiting until all of it is trained and serves"):
                await settling.until_settled(self.watch, _SETTLED_S_MAX)
            last, row = await self._row(rows, at, done.rows)
            requests = done.requests + summary["requests"]
            failed = done.failed_requests + summary["failed_requests"]
            kept = (*done.rows, row)
            done = replace(done, after=last, requests=requests, failed_requests=failed, traffic_s=traffic_s, rows=kept)
        return done

    async def _row(self, rows: RowsRecipe, at: int, before: Sequence[Row]) -> tuple[MeasuredPlays, Row]:
        version = self.watch.champions[-1]
        with self.reporter.doing(f"measuring {version} after {at} {rows.unit}"):
            played = await self._measured(version)
        row = Row.of(at, version, self.recipe.measures, played)
        self.reporter.rows(self.recipe, [[*before, row]])
        return played, row

    async def _measured(self, version: str) -> MeasuredPlays:
        """Its plays; the same tasks and seeds for every version. The registry's audit, with others, may have told the
        agent to stop: these chose nothing.
        """
        command = bound_to_parent(self.recipe.command("measure", {**self._values(), "version": version}))
        environ = environ_of_commands(self.recipe)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environ)
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _MEASURE_S_MAX)
        except TimeoutError:
            raise StartFailed(f"{version} was not measured within {_MEASURE_S_MAX:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        found = MeasuredPlays.read(output)
        if process.returncode or not found.lines:
            status = f"exit status {process.returncode}, {len(found.lines)} scores"
            raise StartFailed(f"{version} was not measured: {status}")
        return found

    async def _agent_at_work(self, given: Mapping[str, object], traffic_s_max: float) -> dict[str, Any]:
        """Let the agent work until it ends or has shown enough; returns its own summary."""
        command = self.recipe.command("agent", {**self._values(), **given})
        deadline = time.monotonic() + traffic_s_max
        told = self.options.out / "agent.json"
        told.unlink(missing_ok=True)  # what an earlier stretch told is not this one's
        async with agent.at_work(command, environ_of_commands(self.recipe)) as process:
            with self.reporter.working(traffic_s_max) as update:
                while process.returncode is None and time.monotonic() < deadline and not self._enough():
                    update(self.watch)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), 0.5)
            if "row" in given and process.returncode is None:
                raise StartFailed(f"the agent was not at row {given['row']} after {traffic_s_max:.0f} s more")
        summary: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
        return summary

    def _enough(self) -> bool:
        goal = self.options.goal
        return self.watch.gain >= goal.enough_gain and self.watch.swaps >= goal.swaps_min

    async def _first_version(self, known: Callable[[], bool]) -> None:
        """It serves, and `known` says that enough is known of it."""
        async with _within(_FIRST_VERSION_S_MAX, "no version took over and was measured"):
            while not (self.watch.champions and known()):
                self.watch.changed.clear()
                await self.watch.changed.wait()

    async def _last_audit(self) -> None:
        """A version is measured after it has taken over: the last one, too, before anything is reported of it."""
        watch = self.watch
        async with _within(_LAST_AUDIT_S_MAX, f"{watch.champions[-1]} was not measured"):
            while watch.champions[-1] not in watch.scores:
                watch.changed.clear()
                await watch.changed.wait()

    def _values(self) -> dict[str, object]:
        return {**self.options.values, "base_url": self.place.base_url, "gateway": self.place.gateway}


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


def environ_of(recipe: Recipe) -> dict[str, str]:
    """Return the environment of the services. The demo's folder is importable as a package, for reward functions."""
    paths = [str(recipe.folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def environ_of_commands(recipe: Recipe) -> dict[str, str]:
    """Return the environment of the demo's own commands, which are a user's programs."""
    return program_environment(recipe.environment, environ=environ_of(recipe))
