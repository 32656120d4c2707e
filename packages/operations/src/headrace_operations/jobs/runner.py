"""Runs a job: check the rows, open the lineage, fill the topic, train, offer. Each part is durable before the next one.

A job that is killed at any moment and started again does the part again that was not finished. Rows and ids follow from
the files, the topic is filled from where it ends, and the trainer goes on from its last save, so the batches, and the
weights, are those of a job that nobody disturbed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from headrace.errors import HeadraceError
from headrace.topics import connected
from headrace_operations.jobs.bus import bus_of
from headrace_operations.jobs.check_report import CheckReport
from headrace_operations.jobs.checking import CheckedRows, Checking
from headrace_operations.jobs.filling import fill
from headrace_operations.jobs.job import Job, PreparedJob, prepare
from headrace_operations.jobs.journal import JobJournal, held
from headrace_operations.replay import copying, training
from headrace_operations.replay.offering import offer
from headrace_schemas import Checkpoint
from headrace_schemas.replay import topic_prefix

Tick = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What came of a job. `checked` is None where an earlier process had checked the rows."""

    lineage: str
    journal: JobJournal
    checked: CheckReport | None
    offered: bool = False

    @property
    def version(self) -> str:
        assert self.journal.version is not None
        return self.journal.version


def run(job: Job, tick: Tick = lambda doing, done, total: None) -> str:
    """Train, and return the last version. `tick` hears what is being done, how far it is and how far it will go.

    Blocks. Raises `UsageError` for what somebody has to change, `HeadraceError` for what fails.
    """
    return asyncio.run(train(prepare(job), tick)).version


async def check(prepared: PreparedJob, tick: Tick, preview: int = 0) -> CheckReport:
    """Look at every row, and write and start nothing that stays."""
    return await Checking(prepared, tick, preview=preview).run()


async def train(prepared: PreparedJob, tick: Tick) -> JobResult:
    """Raises as `run` does."""
    with held(prepared):
        journal = JobJournal.begin(prepared, datetime.now(UTC))
        checked = None
        if journal.version is None:
            journal, checked = await _checked(prepared, journal, tick)
        offered = False
        if journal.version is None or prepared.job.offer:
            async with bus_of(prepared) as bus:
                journal = await _trained(prepared, journal, bus, tick)
                if prepared.job.offer:
                    await offer(bus, prepared.lineage, journal.version)
                    offered = True
        return JobResult(prepared.lineage, journal, checked, offered)


async def _checked(prepared: PreparedJob, journal: JobJournal, tick: Tick) -> tuple[JobJournal, CheckReport | None]:
    path = prepared.place(".rows")
    if journal.rows is not None and path.exists():
        return journal, None
    report = await Checking(prepared, tick, path).run()
    report.check(prepared.job.rows.skip_bad)
    return journal.having(prepared.place(".json"), rows=report.kept, skipped=report.bad), report


async def _trained(prepared: PreparedJob, journal: JobJournal, bus: str, tick: Tick) -> JobJournal:
    if journal.version is not None:
        return journal
    prefix, path = topic_prefix(prepared.lineage), prepared.place(".json")
    topic = f"{prefix}experiences"
    await copying.ensure(bus, prepared.lineage, int(prepared.overrides.get("bus.replication") or 1))
    if journal.base is None:
        tick("opening the lineage", 0, 0)
        await _run_trainer(prepared, bus, lambda accounts: None)
        first = await _made(bus, prefix, 0)
        journal = journal.having(path, base=first.version, base_manifest=first.manifest)
    if journal.experiences is None:
        total = len(CheckedRows(prepared.place(".rows"))) * prepared.job.epochs
        sent = await fill(prepared, journal, bus, topic, total, tick)
        journal = journal.having(path, experiences=sent)
    total = journal.experiences or 0
    accounts = await _run_trainer(prepared, bus, lambda accounts: tick("training", accounts.decided, total))
    found = accounts.result(total, 0)
    if not found.trained:
        raise HeadraceError(_nothing_trained(prepared, {str(k): n for k, n in found.dropped.items()}, found.waiting))
    last = await _made(bus, prefix, -1)
    return journal.having(
        path,
        version=last.version,
        manifest=last.manifest,
        trained=found.trained,
        dropped={str(reason): count for reason, count in found.dropped.items()},
        waiting=found.waiting,
        batches=tuple(batch.digest for batch in found.batches),
    )


async def _run_trainer(
    prepared: PreparedJob, bus: str, progress: Callable[[training.TrainingReports], None]
) -> training.TrainingReports:
    """To the end of what is on the topic, which is nothing before it was filled: then the lineage is begun, and what
    the trainer refuses is refused before a record is written."""
    prefix = topic_prefix(prepared.lineage)
    overrides = prepared.overrides
    own = {
        "lineage": prepared.lineage,
        "topic": f"{prefix}experiences",
        "cut": "rules",
        "until_end": True,
        "announce_to": prefix,
        "port": 0,
    }
    for name, value in own.items():
        overrides.set(f"trainer.{name}", value)
    return await training.run_trainer(overrides.environ, bus, prefix, prepared.place(".log"), progress)


async def _made(bus: str, prefix: str, place: int) -> Checkpoint:
    """One of the lineage's versions, by its place: 0 is what it begins with, -1 the last."""
    async with connected(bus) as topics:
        made = await training.checkpoints(topics, prefix)
    if not made:
        raise HeadraceError("the trainer ended without a version")
    return made[place]


def _nothing_trained(prepared: PreparedJob, dropped: dict[str, int], waiting: int) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    parts = [f"dropped: {reasons}" if reasons else "", f"{waiting} too few for a batch" if waiting else ""]
    return (
        f"nothing was trained ({'; '.join(filter(None, parts)) or 'the topic is empty'}): these rows are not what "
        f"{prepared.job.kind} learns from, or trainer.batch_experiences_min is more than there are; "
        f"the trainer's log is {prepared.place('.log')}"
    )
