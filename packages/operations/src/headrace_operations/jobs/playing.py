"""A stage of reinforcement learning: own services, a program that plays tasks against them, and online training.

The stage ends after a number of training steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime

from headrace.errors import HeadraceError, Unreachable
from headrace.topics import connected
from headrace_operations.jobs.job import JobJournal, PreparedJob, lock_job
from headrace_operations.jobs.runner import JobResult
from headrace_operations.replay import program
from headrace_operations.supervisor import Supervisor
from headrace_runtime.process.parent_death import bound_to_parent
from headrace_runtime.process.programs import program_environment
from headrace_schemas import Checkpoint, TrainingMetrics

_POLL_S = 0.5
_READY_S_MAX = 600.0
Tick = Callable[[str, int, int], None]


async def train_stage(
    prepared: PreparedJob, command: Sequence[str], steps: int, tick: Tick, variables: Sequence[str] = ()
) -> JobResult:
    """Train a stage with the traffic of a program and return its last version. An interrupted stage resumes.

    Args:
        prepared: the job of the stage.
        command: the program, with placeholders.
        steps: training steps after which the stage ends.
        tick: reports the progress.
        variables: names of environment variables that the program gets.

    Raises:
        StartFailed: the services did not start.
        HeadraceError: the program ended before the steps were taken.
    """
    with lock_job(prepared):
        path = prepared.file_path(".json")
        journal = JobJournal.begin(prepared, datetime.now(UTC))
        if journal.version is None:
            tick("starting the services", 0, 0)
            async with _services(prepared) as supervisor:
                reports = await _run_program(prepared, supervisor, command, steps, tick, variables)
                first, last = await _first_and_last_version(supervisor.plan.bus, prepared.lineage)
            result = reports.result(reports.decided, 0)
            journal = journal.record(
                path,
                base=first.version,
                base_manifest=first.manifest,
                version=last.version,
                manifest=last.manifest,
                trained=result.trained,
                dropped={str(reason): count for reason, count in result.dropped.items()},
                batches=tuple(batch.digest for batch in result.batches),
            )
        return JobResult(prepared.lineage, journal, None)


@contextlib.asynccontextmanager
async def _services(prepared: PreparedJob) -> AsyncIterator[Supervisor]:
    """Start the services of `headrace up` in a data directory of the stage. All stages share the blob store."""
    overrides = prepared.overrides
    blobs = overrides.get("blobs.url") or (prepared.data_dir / "blobs").as_uri()
    stage_settings: dict[
        str, object
    ] = {  # the settings file configures the algorithm of the live lineage, not this one
        "trainer.advantage.kind": "",
        "trainer.loss.kind": "",
    }
    stage_settings |= {**prepared.job.settings, "blobs.url": blobs, "trainer.lineage": prepared.lineage}
    stage_settings |= {"trainer.base": prepared.base, "trainer.algorithm": prepared.job.kind}
    supervisor = await asyncio.to_thread(
        Supervisor,
        prepared.file_path(".services"),
        config=prepared.job.config,
        settings=stage_settings,
        auto_ports=True,
    )
    try:
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_ready, _READY_S_MAX)
        yield supervisor
    finally:
        await asyncio.to_thread(supervisor.stop)


async def _run_program(
    prepared: PreparedJob,
    supervisor: Supervisor,
    command: Sequence[str],
    steps: int,
    tick: Tick,
    variables: Sequence[str],
) -> program.TrainingReports:
    values = {
        "python": sys.executable,
        "base_url": supervisor.base_url,
        "url": supervisor.url("gateway"),
        "model": prepared.model,
    }
    arguments = [_fill_placeholders(part, values) for part in command]
    extra_variables = {"OPENAI_BASE_URL": values["base_url"], "OPENAI_API_KEY": "none"}
    environ = program_environment(variables, more=extra_variables, environ=prepared.overrides.environ)
    reports = program.TrainingReports()
    process = await asyncio.create_subprocess_exec(*bound_to_parent(arguments), env=environ, stdout=sys.stderr)
    try:
        async with connected(supervisor.plan.bus) as topics:
            while _steps_taken(reports) < steps:
                with contextlib.suppress(Unreachable):
                    await program.follow(topics, TrainingMetrics.topic, reports)
                tick("playing and training", min(_steps_taken(reports), steps), steps)
                if process.returncode is not None and _steps_taken(reports) < steps:
                    raise HeadraceError(
                        f"{arguments[0]} ended with status {process.returncode} after {_steps_taken(reports)} of "
                        f"{steps} steps; run the same command again to resume"
                    )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _POLL_S)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return reports


def _steps_taken(reports: program.TrainingReports) -> int:
    return max((batch.step for batch in reports.batches), default=0)


async def _first_and_last_version(bus: str, lineage: str) -> tuple[Checkpoint, Checkpoint]:
    """Read the versions that a training job published for its lineage, and return the first and the last one.

    Raises:
        HeadraceError: the lineage has only its base version, because the job took too few steps.
    """
    async with connected(bus) as topics:
        checkpoints = [
            checkpoint for checkpoint in await program.checkpoints(topics, "") if checkpoint.lineage == lineage
        ]
    if len(checkpoints) < 2:
        raise HeadraceError(
            f"lineage {lineage}: has no version but its base; steps must be at least trainer.steps_per_version"
        )
    return checkpoints[0], checkpoints[-1]


def _fill_placeholders(argument: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        argument = argument.replace(f"{{{name}}}", value)
    return argument
