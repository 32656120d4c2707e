"""A stage of reinforcement learning: services of its own, a program that plays tasks against them, and training as it
goes on whenever Headrace runs. It ends after so many steps."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime

from headrace.errors import HeadraceError, Unreachable
from headrace.topics import connected
from headrace_operations.jobs.job import PreparedJob
from headrace_operations.jobs.journal import JobJournal, held
from headrace_operations.jobs.runner import JobResult
from headrace_operations.replay import training
from headrace_operations.supervisor import Supervisor
from headrace_runtime.parent_death import bound_to_parent
from headrace_runtime.program_environment import program_environment
from headrace_schemas import Checkpoint, TrainingMetrics

_LOOK_S = 0.5
_READY_S_MAX = 600.0
Tick = Callable[[str, int, int], None]


async def play(
    prepared: PreparedJob, command: Sequence[str], steps: int, tick: Tick, passed_on: Sequence[str] = ()
) -> JobResult:
    """Returns with the last version. A stage that was interrupted goes on with the weights that it had.
    `passed_on` names environment variables for the program.

    Raises `StartFailed` when the services do not come up, `HeadraceError` when the program ends before the steps were
    taken.
    """
    with held(prepared):
        path = prepared.place(".json")
        journal = JobJournal.begin(prepared, datetime.now(UTC))
        if journal.version is None:
            tick("starting the services", 0, 0)
            async with _services(prepared) as supervisor:
                accounts = await _played(prepared, supervisor, command, steps, tick, passed_on)
                first, last = await _versions(supervisor.plan.bus, prepared.lineage)
            found = accounts.result(accounts.decided, 0)
            journal = journal.having(
                path,
                base=first.version,
                base_manifest=first.manifest,
                version=last.version,
                manifest=last.manifest,
                trained=found.trained,
                dropped={str(reason): count for reason, count in found.dropped.items()},
                batches=tuple(batch.digest for batch in found.batches),
            )
        return JobResult(prepared.lineage, journal, None)


@contextlib.asynccontextmanager
async def _services(prepared: PreparedJob) -> AsyncIterator[Supervisor]:
    """Everything that `headrace up` starts, in a folder of the stage's own. Blobs are shared with the other stages."""
    overrides = prepared.overrides
    blobs = overrides.get("blobs.url") or (prepared.data_dir / "blobs").as_uri()
    own: dict[str, object] = {
        "trainer.advantage.kind": "",
        "trainer.loss.kind": "",
    }  # what a file says of them is for another algorithm
    own |= {**prepared.job.settings, "blobs.url": blobs, "trainer.lineage": prepared.lineage}
    own |= {"trainer.base": prepared.base, "trainer.algorithm": prepared.job.kind}
    supervisor = await asyncio.to_thread(
        Supervisor, prepared.place(".services"), config=prepared.job.config, settings=own, auto_ports=True
    )
    try:
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_ready, _READY_S_MAX)
        yield supervisor
    finally:
        await asyncio.to_thread(supervisor.stop)


async def _played(
    prepared: PreparedJob,
    supervisor: Supervisor,
    command: Sequence[str],
    steps: int,
    tick: Tick,
    passed_on: Sequence[str],
) -> training.TrainingReports:
    values = {
        "python": sys.executable,
        "base_url": supervisor.base_url,
        "url": supervisor.url("gateway"),
        "model": prepared.model,
    }
    filled = [_filled(one, values) for one in command]
    more = {"OPENAI_BASE_URL": values["base_url"], "OPENAI_API_KEY": "none"}
    environ = program_environment(passed_on, more=more, environ=prepared.overrides.environ)
    accounts = training.TrainingReports()
    process = await asyncio.create_subprocess_exec(*bound_to_parent(filled), env=environ, stdout=sys.stderr)
    try:
        async with connected(supervisor.plan.bus) as topics:
            while _taken(accounts) < steps:
                with contextlib.suppress(Unreachable):
                    await training.follow(topics, TrainingMetrics.topic, accounts)
                tick("playing and training", min(_taken(accounts), steps), steps)
                if process.returncode is not None and _taken(accounts) < steps:
                    raise HeadraceError(
                        f"{filled[0]} ended (status {process.returncode}) after {_taken(accounts)} of {steps} steps; "
                        "the same command goes on from there"
                    )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _LOOK_S)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return accounts


def _taken(accounts: training.TrainingReports) -> int:
    return max((batch.step for batch in accounts.batches), default=0)


async def _versions(bus: str, lineage: str) -> tuple[Checkpoint, Checkpoint]:
    """The first and the last of the lineage."""
    async with connected(bus) as topics:
        made = [one for one in await training.checkpoints(topics, "") if one.lineage == lineage]
    if len(made) < 2:
        raise HeadraceError(
            f"lineage {lineage} has only its base; the stage has fewer steps than trainer.steps_per_version"
        )
    return made[0], made[-1]


def _filled(argument: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        argument = argument.replace(f"{{{name}}}", value)
    return argument
