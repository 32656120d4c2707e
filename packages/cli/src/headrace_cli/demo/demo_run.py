"""Steps of a demo on a running Headrace: measure the first version, let the agent work, measure the last version.

`TrainingWait` waits until everything that the agent did so far is trained and serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.following import Follower
from headrace.topics import Topics, connected
from headrace_cli.demo.console_reporter import ConsoleReporter, Watch
from headrace_cli.demo.measures import MeasuredPlays, Row, RowsRecipe
from headrace_cli.demo.recipe import Goal, Recipe
from headrace_operations.supervisor.state import StartFailed
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import program_environment
from headrace_schemas import Experience, TrainingMetrics

_POLL_S = 0.5
_QUIET_S = 4.0
"""If no new experience arrives for this time, collector and scorer have processed all runs that ended."""
_STALLED_S = 20.0
"""If no report arrives for this time, the remaining experiences are too few for the trainer's smallest batch."""


class TrainingWait:
    """Waits until the agent's work so far is trained, by reading the model's experiences and training reports.

    `until_settled` can be called repeatedly.
    """

    def __init__(self, bus: str, model: str) -> None:
        self._bus, self._model = bus, model
        self._follow = Follower(Experience.topic, TrainingMetrics.topic)
        self._untrained: set[str] = set()
        self._version: str | None = None
        """Newest version that the trainer reported."""
        self._changed_s = 0.0

    async def until_settled(self, watch: Watch, timeout_s: float) -> None:
        """Wait until the newest version is promoted or refused and the trainer has nothing more to train.

        Raises:
            StartFailed: the wait takes longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self._changed_s = time.monotonic()
        async with connected(self._bus) as topics:
            await self._read(topics)
            while not self._is_settled(watch):
                if time.monotonic() > deadline:
                    raise StartFailed(
                        f"after {timeout_s:g} s {len(self._untrained)} experiences are not trained, and the newest "
                        f"version is {self._version}; see `headrace logs trainer` and `headrace logs registry`"
                    )
                await asyncio.sleep(_POLL_S)
                await self._read(topics)

    def _is_settled(self, watch: Watch) -> bool:
        quiet_s = time.monotonic() - self._changed_s
        decided = self._version is None or self._version in watch.champions or self._version in watch.rejected
        return decided and quiet_s > (_STALLED_S if self._untrained else _QUIET_S)

    async def _read(self, topics: Topics) -> None:
        async for experience in self._follow.events(topics, Experience):
            if experience.model == self._model:
                self._untrained.add(experience.experience_id)
                self._changed_s = time.monotonic()
        async for report in self._follow.events(topics, TrainingMetrics):
            if report.model == self._model:
                self._add(report)

    def _add(self, report: TrainingMetrics) -> None:
        self._changed_s = time.monotonic()
        self._version = report.version or self._version
        self._untrained -= {outcome.experience_id for outcome in report.verdicts}
        self._untrained |= {outcome.experience_id for outcome in report.undone if outcome.queued}
        self._untrained -= {outcome.experience_id for outcome in report.restored}


_STOP_S_MAX = 600.0
_FIRST_VERSION_S_MAX = 1200.0
_LAST_AUDIT_S_MAX = 900.0
_MEASURE_S_MAX = 1200.0
_SETTLED_S_MAX = 1800.0
"""Bounds of a demo that hangs: several times what a model of 135 million parameters takes on two busy cores."""


@contextlib.asynccontextmanager
async def running_agent(command: Sequence[str], environ: Mapping[str, str]) -> AsyncIterator[Process]:
    """Start the agent, yield its process for the duration of the block, and stop it with SIGTERM afterwards.

    The agent gets time to finish. The block may wait for its end.
    """
    process = await asyncio.create_subprocess_exec(*parent_bound_command(command), env=environ)
    try:
        yield process
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), _STOP_S_MAX)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a demo that the command line sets."""

    seed: int
    goal: Goal
    data_dir: Path
    cache: Path
    out: Path
    settings: Mapping[str, object]
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreter by service, for services with their own environment."""

    @property
    def values(self) -> dict[str, object]:
        """Values for the placeholders of the recipe's commands."""
        return {"cache": self.cache, "seed": self.seed, "tasks": self.goal.tasks, "out": self.out.absolute()}


@dataclass(frozen=True, slots=True)
class StackAddress:
    """Addresses of the Headrace that a demo uses, which the demo or the user has started."""

    bus: str
    gateway: str
    """Root URL of the gateway."""
    console: str = ""
    """URL of the web console, where it runs."""

    @property
    def base_url(self) -> str:
        return f"{self.gateway}/v1"


@dataclass(frozen=True, slots=True)
class DemoRunResult:
    """Measurements of the first and the last version, and counts of the agent's requests and seconds."""

    before: MeasuredPlays
    after: MeasuredPlays
    requests: int
    failed_requests: int
    traffic_began: float
    """Unix time in seconds."""
    traffic_s: float
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One run of a recipe on one running Headrace."""

    recipe: Recipe
    options: Options
    stack: StackAddress
    reporter: ConsoleReporter
    watch: Watch

    async def run_with_gate(self) -> DemoRunResult:
        """Let the agent work until the registry's audit scores reach the goal or its tasks end, and measure the first
        and the last version. If the tasks end, the last version is the one that serves once they are trained."""
        with self.reporter.show_activity("loading, probing and evaluating the first version"):
            await self._wait_first_version(lambda: self.watch.champions[0] in self.watch.scores)
        with self.reporter.show_activity("measuring it as the last one will be"):
            before = await self._measure(self.watch.champions[0])
        began = time.time()
        summary = await self._run_agent({}, self.options.goal.traffic_s_max)
        traffic_s = time.time() - began
        if not self._goal_reached():  # a busy machine must not leave sessions or versions out
            await self._wait_settled(TrainingWait(self.stack.bus, self.recipe.model))
        with self.reporter.show_activity("waiting until the last version is measured"):
            await self._wait_last_audit()
        with self.reporter.show_activity("measuring the last version"):
            after = await self._measure(self.watch.champions[-1])
        return DemoRunResult(before, after, summary["requests"], summary["failed_requests"], began, traffic_s)

    async def run_rows(self, rows: RowsRecipe) -> DemoRunResult:
        """Let the agent work from one point of the recipe's rows to the next, and measure the serving version at each
        point.

        Each measurement waits until everything before it is trained.
        """
        with self.reporter.show_activity("loading and probing the first version"):
            await self._wait_first_version(lambda: True)
        began = time.time()
        first, row = await self._row(rows, 0, [])
        result = DemoRunResult(first, first, 0, 0, began, 0.0, (row,))
        settling = TrainingWait(self.stack.bus, self.recipe.model)
        for before, at in rows.stretches:
            started_s = time.monotonic()
            left_s = self.options.goal.traffic_s_max - result.traffic_s
            summary = await self._run_agent({"row_before": before, "row": at}, left_s)
            traffic_s = result.traffic_s + time.monotonic() - started_s
            await self._wait_settled(settling)
            last, row = await self._row(rows, at, result.rows)
            requests = result.requests + summary["requests"]
            failed = result.failed_requests + summary["failed_requests"]
            measured_rows = (*result.rows, row)
            result = replace(
                result, after=last, requests=requests, failed_requests=failed, traffic_s=traffic_s, rows=measured_rows
            )
        return result

    async def _wait_settled(self, settling: TrainingWait) -> None:
        with self.reporter.show_activity("waiting until all of it is trained and serves"):
            await settling.until_settled(self.watch, _SETTLED_S_MAX)

    async def _row(self, rows: RowsRecipe, at: int, earlier_rows: Sequence[Row]) -> tuple[MeasuredPlays, Row]:
        version = self.watch.champions[-1]
        with self.reporter.show_activity(f"measuring {version} after {at} {rows.unit}"):
            plays = await self._measure(version)
        row = Row.of(at, version, self.recipe.measures, plays)
        self.reporter.print_rows(self.recipe, [[*earlier_rows, row]])
        return plays, row

    async def _measure(self, version: str) -> MeasuredPlays:
        """Let a version play the demo's held-out tasks, and return the results. All versions get the same tasks and
        seeds.

        The plays take part in no decision: the agent stops by the registry's audit, which uses other plays.
        """
        command = parent_bound_command(self.recipe.command("measure", {**self._values(), "version": version}))
        environ = command_environment(self.recipe)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environ)
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _MEASURE_S_MAX)
        except TimeoutError:
            raise StartFailed(f"{version} was not measured within {_MEASURE_S_MAX:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        plays = MeasuredPlays.read(output)
        if process.returncode or not plays.lines:
            status = f"exit status {process.returncode}, {len(plays.lines)} scores"
            raise StartFailed(f"{version} was not measured: {status}")
        return plays

    async def _run_agent(self, values: Mapping[str, object], traffic_s_max: float) -> dict[str, Any]:
        """Run the agent until it ends or the goal is reached, and return its own summary."""
        command = self.recipe.command("agent", {**self._values(), **values})
        deadline = time.monotonic() + traffic_s_max
        summary_file = self.options.out / "agent.json"
        summary_file.unlink(missing_ok=True)  # remove the summary of an earlier row
        async with running_agent(command, command_environment(self.recipe)) as process:
            with self.reporter.agent_progress(self.options.goal.tasks, traffic_s_max) as update:
                while process.returncode is None and time.monotonic() < deadline and not self._goal_reached():
                    update(self.watch, _finished_tasks(summary_file))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), 0.5)
            if "row" in values and process.returncode is None:
                raise StartFailed(f"the agent did not reach row {values['row']} within another {traffic_s_max:.0f} s")
        summary: dict[str, Any] = json.loads(summary_file.read_text(encoding="utf-8"))
        return summary

    def _goal_reached(self) -> bool:
        goal = self.options.goal
        return self.watch.gain >= goal.enough_gain and self.watch.swaps >= goal.swaps_min

    async def _wait_first_version(self, is_ready: Callable[[], bool]) -> None:
        """Wait until a first version serves and `is_ready` returns true."""
        async with _within(_FIRST_VERSION_S_MAX, "no version took over and was measured"):
            while not (self.watch.champions and is_ready()):
                self.watch.changed.clear()
                await self.watch.changed.wait()

    async def _wait_last_audit(self) -> None:
        """Wait until the registry has reported the newest champion's score on the audit tasks, which are held out.

        A version plays them only after its promotion, so its score comes later than the promotion.
        """
        watch = self.watch
        async with _within(_LAST_AUDIT_S_MAX, f"{watch.champions[-1]} was not measured"):
            while watch.champions[-1] not in watch.scores:
                watch.changed.clear()
                await watch.changed.wait()

    def _values(self) -> dict[str, object]:
        return {**self.options.values, "base_url": self.stack.base_url, "gateway": self.stack.gateway}


def _finished_tasks(summary: Path) -> int:
    """Return the number of finished tasks in the agent's summary file, or 0 if the file cannot be read yet."""
    try:
        return int(json.loads(summary.read_text(encoding="utf-8")).get("tasks", 0))
    except (FileNotFoundError, ValueError, RecursionError):
        return 0


@contextlib.asynccontextmanager
async def _within(limit_s: float, problem: str) -> AsyncIterator[None]:
    """Limit the time of a block; raise `StartFailed` with `problem` if it takes longer."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise StartFailed(
            f"{problem} within {limit_s:g} s; use --data-dir to keep the logs of the services for `headrace logs`"
        ) from None


def service_environment(recipe: Recipe) -> dict[str, str]:
    """Return the environment variables of the services, in which the demo's folder can be imported for reward
    functions.
    """
    paths = [str(recipe.folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def command_environment(recipe: Recipe) -> dict[str, str]:
    """Return the environment variables of the demo's own commands, which are programs of a user."""
    return program_environment(recipe.environment, environ=service_environment(recipe))
