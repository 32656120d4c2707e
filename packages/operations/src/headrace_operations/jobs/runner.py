"""Execution of a job: check the rows, start the lineage, fill the topic, train, announce the version.

Each finished part is stored durably. A job that was killed repeats only the part that was not finished. Rows and ids
follow from the files, the topic is filled from its present end, and the trainer resumes from its last checkpoint, so
batches and weights are those of an uninterrupted job. The job uses the configured bus, that of a running `headrace up`,
or an embedded broker for its duration.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from headrace.errors import HeadraceError
from headrace.topics import connected
from headrace_operations.jobs.checking import CheckedRows, RowChecker
from headrace_operations.jobs.checks import CheckReport
from headrace_operations.jobs.filling import fill_topic
from headrace_operations.jobs.job import Job, JobJournal, PreparedJob, lock_job, prepare
from headrace_operations.replay import copying, program
from headrace_operations.replay.program import offer_version
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.plan import installed
from headrace_operations.supervisor.state import NotRunning, read
from headrace_schemas import Checkpoint
from headrace_schemas.programs import topic_prefix

_BROKER_START_S_MAX = 600.0
"""Maximum time until the embedded broker answers. It is long, because no user waits for a job."""


@contextlib.asynccontextmanager
async def open_bus(prepared: PreparedJob) -> AsyncIterator[str]:
    """Start a broker if no bus runs, yield the address of the bus, and set this address for the programs of the job.

    Raises:
        UsageError: a setting is invalid.
        StartFailed: the embedded broker did not start.
    """
    address = prepared.job.bus or str(prepared.overrides.get("bus.address") or "") or _running_bus(prepared)
    if address:
        prepared.overrides.set("bus.address", address)
        yield address
        return
    brokers = [name for name, info in installed().items() if info.is_bus]
    # The broker's file is in the data directory, so `headrace up` and the job see each other's topics.
    supervisor = await asyncio.to_thread(
        Supervisor, prepared.data_dir, only=brokers, auto_ports=True, environ=prepared.overrides.environ
    )
    try:
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_up, _BROKER_START_S_MAX)
        prepared.overrides.set("bus.address", supervisor.plan.bus)
        yield supervisor.plan.bus
    finally:
        await asyncio.to_thread(supervisor.stop)


def _running_bus(prepared: PreparedJob) -> str | None:
    try:
        return read(prepared.data_dir).bus
    except NotRunning:
        return None


Tick = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job. `checked` is None if an earlier process checked the rows."""

    lineage: str
    journal: JobJournal
    checked: CheckReport | None
    offered: bool = False

    @property
    def version(self) -> str:
        assert self.journal.version is not None
        return self.journal.version


def run(job: Job, tick: Tick = lambda activity, completed, total: None) -> str:
    """Run a job and return the version id of its last version. The call blocks.

    Args:
        job: the job.
        tick: called with the activity, the completed amount and the total amount.

    Raises:
        UsageError: the job, a row or a setting is invalid.
        HeadraceError: the job failed.
    """
    return asyncio.run(train(prepare(job), tick)).version


async def check(prepared: PreparedJob, tick: Tick, preview: int = 0) -> CheckReport:
    """Check every row of a job without writing files or publishing records, and return the counts."""
    return await RowChecker(prepared, tick, preview=preview).run()


async def train(prepared: PreparedJob, tick: Tick) -> JobResult:
    """Run all unfinished parts of a job. Raises the errors of `run`."""
    with lock_job(prepared):
        journal = JobJournal.begin(prepared, datetime.now(UTC))
        checked = None
        if journal.version is None:
            journal, checked = await _check_rows(prepared, journal, tick)
        offered = False
        if journal.version is None or prepared.job.offer:
            async with open_bus(prepared) as bus:
                journal = await _train_lineage(prepared, journal, bus, tick)
                if prepared.job.offer:
                    await offer_version(bus, prepared.lineage, journal.version)
                    offered = True
        return JobResult(prepared.lineage, journal, checked, offered)


async def _check_rows(prepared: PreparedJob, journal: JobJournal, tick: Tick) -> tuple[JobJournal, CheckReport | None]:
    path = prepared.file_path(".rows")
    if journal.rows is not None and path.exists():
        return journal, None
    report = await RowChecker(prepared, tick, path).run()
    report.check(prepared.job.rows.skip_bad)
    return journal.record(prepared.file_path(".json"), rows=report.kept, skipped=report.bad), report


async def _train_lineage(prepared: PreparedJob, journal: JobJournal, bus: str, tick: Tick) -> JobJournal:
    if journal.version is not None:
        return journal
    prefix, path = topic_prefix(prepared.lineage), prepared.file_path(".json")
    topic = f"{prefix}experiences"
    await copying.ensure(bus, prepared.lineage, int(prepared.overrides.get("bus.replication") or 1))
    if journal.base is None:
        tick("opening the lineage", 0, 0)
        await _run_trainer(prepared, bus, lambda reports: None)
        first = await _find_version(bus, prefix, 0)
        journal = journal.record(path, base=first.version, base_manifest=first.manifest)
    if journal.experiences is None:
        total = len(CheckedRows(prepared.file_path(".rows"))) * prepared.job.epochs
        sent = await fill_topic(prepared, journal, bus, topic, total, tick)
        journal = journal.record(path, experiences=sent)
    total = journal.experiences or 0
    reports = await _run_trainer(prepared, bus, lambda reports: tick("training", reports.decided, total))
    result = reports.result(total, 0)
    if not result.trained:
        dropped = {str(reason): count for reason, count in result.dropped.items()}
        raise HeadraceError(_nothing_trained_message(prepared, dropped, result.waiting))
    last = await _find_version(bus, prefix, -1)
    return journal.record(
        path,
        version=last.version,
        manifest=last.manifest,
        trained=result.trained,
        dropped={str(reason): count for reason, count in result.dropped.items()},
        waiting=result.waiting,
        batches=tuple(batch.digest for batch in result.batches),
    )


async def _run_trainer(
    prepared: PreparedJob, bus: str, progress: Callable[[program.TrainingReports], None]
) -> program.TrainingReports:
    """Run the trainer on the job's topic until its end, and return its reports.

    On an empty topic the run only creates the lineage, so settings that the trainer refuses fail before a record is
    written.
    """
    prefix = topic_prefix(prepared.lineage)
    overrides = prepared.overrides
    job = {"topic": f"{prefix}experiences", "cut": "rules", "until_end": True, "announce_to": prefix}
    trainer_settings = {"lineage": prepared.lineage, "port": 0, "job": job}
    for name, value in trainer_settings.items():
        overrides.set(f"trainer.{name}", value)
    return await program.run_trainer(overrides.environ, bus, prefix, prepared.file_path(".log"), progress)


async def _find_version(bus: str, prefix: str, index: int) -> Checkpoint:
    """Return a version of the lineage by its index: 0 is the first one, -1 the last one."""
    async with connected(bus) as topics:
        checkpoints = await program.checkpoints(topics, prefix)
    if not checkpoints:
        raise HeadraceError("the trainer ended without publishing a version")
    return checkpoints[index]


def _nothing_trained_message(prepared: PreparedJob, dropped: dict[str, int], waiting: int) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    parts = [f"dropped: {reasons}" if reasons else "", f"{waiting} too few for a batch" if waiting else ""]
    return (
        f"nothing was trained ({'; '.join(filter(None, parts)) or 'the topic is empty'}): {prepared.job.kind} cannot "
        "learn from these rows, or there are fewer rows than trainer.batch_experiences_min; "
        f"the log of the trainer is {prepared.file_path('.log')}"
    )
