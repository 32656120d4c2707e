"""Starts a trainer for the replay, follows its reports on the bus, and stops it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import HeadraceError, UsageError
from headrace.topics import Range, Topics, connected, event_of
from headrace_operations.replay.program import module_of, reason_of
from headrace_operations.replay.request import Request
from headrace_runtime.parent_death import bound_to_parent
from headrace_schemas import BatchRecord, Checkpoint, Event, TrainingMetrics
from headrace_schemas.replay import DryRunBatch, DryRunLine

_LOOK_INTERVAL_S = 0.5
_USAGE = 2


@dataclass(slots=True)
class TrainingReports:
    """What the trainer has reported so far."""

    offset: int = 0
    seen: set[str] = field(default_factory=set)
    batches: list[BatchRecord] = field(default_factory=list)
    fates: Counter[str | None] = field(default_factory=Counter)

    def add(self, account: TrainingMetrics) -> None:
        if account.event_id not in self.seen:
            self.seen.add(account.event_id)
            self.batches += account.batches
            self.fates.update(verdict.dropped for verdict in account.verdicts)

    @property
    def decided(self) -> int:
        return sum(self.fates.values())

    def result(self, experiences: int, versions: int) -> DryRunLine:
        """`experiences` is what was there to train; what has no verdict waits, or was there twice."""
        dropped = {str(reason): count for reason, count in sorted(self.fates.items(), key=str) if reason is not None}
        return DryRunLine.model_validate(
            {
                "trained": self.fates[None],
                "dropped": dropped,
                "waiting": max(0, experiences - self.decided),
                "batches": [DryRunBatch(experiences=one.experiences, digest=one.digest) for one in self.batches],
                "versions": versions,
            }
        )


async def follow(topics: Topics, topic: str, accounts: TrainingReports) -> None:
    """Add what is new."""
    async for record in topics.records(Range(topic, from_offset=accounts.offset)):
        accounts.offset = record.offset + 1
        event = await event_of(TrainingMetrics.topic, record.value, record.headers)
        if isinstance(event, TrainingMetrics):
            accounts.add(event)


async def checkpoints(topics: Topics, prefix: str) -> list[Checkpoint]:
    """The versions of a replay, the base first."""
    found: dict[str, Event] = {}
    async for record in topics.records(Range(f"{prefix}{Checkpoint.topic}")):
        event = await event_of(Checkpoint.topic, record.value, record.headers)
        found[event.event_id] = event
    return [event for event in found.values() if isinstance(event, Checkpoint)]


async def train(
    request: Request, recorded: bool, log: Path, progress: Callable[[TrainingReports], None]
) -> TrainingReports:
    """Train what was copied, to its end. Raises as `run_trainer` does."""
    environ = request.environ(
        lineage=request.lineage,
        topic=request.topic,
        replays=request.of,
        cut="recorded" if recorded else "rules",
        until_end=True,
        announce_to=request.prefix,
        port=0,
    )
    return await run_trainer(environ, request.bus, request.prefix, log, progress)


async def run_trainer(
    environ: Mapping[str, str], bus: str, prefix: str, log: Path, progress: Callable[[TrainingReports], None]
) -> TrainingReports:
    """Run a trainer to its end and follow what it says on the topics behind `prefix`.

    Raises `UsageError` for settings that it refuses, `HeadraceError` when it fails.
    """
    accounts = TrainingReports()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        command = bound_to_parent([sys.executable, "-m", module_of("trainer")])
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env=dict(environ))
    ended = asyncio.create_task(process.wait())
    try:
        async with connected(bus) as topics:
            while not ended.done():
                await asyncio.wait([ended], timeout=_LOOK_INTERVAL_S)
                await follow(topics, f"{prefix}{TrainingMetrics.topic}", accounts)
                progress(accounts)
            await follow(topics, f"{prefix}{TrainingMetrics.topic}", accounts)
    finally:
        if process.returncode is None:
            process.terminate()
            await ended
    if process.returncode:
        lines = (await asyncio.to_thread(log.read_text, "utf-8", "replace")).splitlines()
        kind = UsageError if process.returncode == _USAGE else HeadraceError
        raise kind(f"{reason_of(lines, 'trainer')} (its log is {log})")
    return accounts
