"""The program `python -m headrace_judge.replay`, which judges stored trajectories again.

It runs the code of the service with lines on standard input and output in place of the bus. Queue, retries, budget and
pairwise comparisons are in a separate database. It is emptied first, except for the budget and the cached verdicts, so
that no question is paid for in two replays.

The program reads lines `trajectory` and writes lines `reward`. A later reward of a trajectory replaces earlier ones of
the same source. At the end it writes one line `outcome_counts`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from datetime import datetime

from sqlalchemy import delete, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_judge import app
from headrace_judge.settings import JudgeSettings
from headrace_judge.tables import CONTESTANTS, CONTESTS, DEADLINE_JOB, PAIRS, STREAM, VERDICT_JOB, transact
from headrace_runtime.clock import SystemClock
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record
from headrace_runtime.main import Service
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common, DatabaseSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database, migrate
from headrace_runtime.stream.delivery import Outbox
from headrace_runtime.stream.jobs import Jobs
from headrace_runtime.stream.processor import Processor
from headrace_runtime.stream.stream_service import StreamService
from headrace_schemas import Event, Reward, Trajectory
from headrace_schemas.programs import JudgedLine

SERVICE = Service("judge", "Judges stored trajectories again.", JudgeSettings, "headrace_judge.replay:run")
_BATCH_MAX = 50
_WAITING_MAX = 200
"""Jobs that may wait. This is far below the limit of the queue, beyond which runs would not be judged at all."""
_POLL_S = 0.1


class RewardWriter(EventProducer):
    """Event producer of a replay, which writes rewards to the output `lines` instead of publishing them on the bus.

    It drops all other events.
    """

    def __init__(self, common: Common, blobs: BlobStore, lines: Lines) -> None:
        super().__init__(common.bus, "headrace/judge", blobs)
        self._lines = lines
        self._latest: dict[tuple[str, str], Reward] = {}

    async def send_raw(self, records: Iterable[Outgoing]) -> None:
        for record in records:
            if record.topic == Reward.topic and record.value is not None:
                reward = Reward.from_json(record.value)
                self._latest[reward.trajectory_id, reward.source] = reward
                self._lines.write("reward", record.value)
        self._lines.flush()

    def outcome_counts(self) -> JudgedLine:
        """Return the line with the number of final outcomes of all trajectories by source."""
        outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        for reward in self._latest.values():
            outcomes[reward.source][reward.outcome] += 1
        by_source = sorted(outcomes.items())
        return JudgedLine(outcomes={source: dict(sorted(counts.items())) for source, counts in by_source})


async def run(common: Common, settings: JudgeSettings, lines: Lines | None = None) -> None:
    """Judge the trajectories of standard input. Only one replay may run at a time on a data directory.

    Raises:
        SettingError: a setting is invalid.
    """
    service = app.service(settings)
    lines, blobs = lines or Lines(), BlobStore.open(common)
    database = Database.open("judge-replay", common.model_copy(update={"database": DatabaseSettings()}))
    producer = RewardWriter(common, blobs, lines)
    clock = SystemClock()
    processor = Processor(
        service="judge",
        handlers=service.handlers,
        database=database,
        tables=service.tables,
        outbox=Outbox(database, service.tables, producer, clock),
        blobs=blobs,
        clock=clock,
        limits=service.limits,
    )
    try:
        await migrate(database, service.package)
        await _clear(database)
        await _run_with_workers(service.workers(processor), _judge(service, processor, lines))
    finally:
        await database.close()
    lines.write("judged", producer.outcome_counts().model_dump_json().encode())
    lines.flush()


async def _run_with_workers(workers: Sequence[Awaitable[None]], work: Coroutine[None, None, None]) -> None:
    """Run the workers until `work` is done. Raises the first exception of any of them."""
    tasks = [asyncio.ensure_future(work), *map(asyncio.ensure_future, workers)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _judge(service: StreamService, processor: Processor, lines: Lines) -> None:
    """Pass all lines to the service, no faster than it judges them, and wait until all jobs are done."""
    records: list[Record] = []
    offset = 0
    async for _, value in lines.read():
        records.append(Record(Trajectory.topic, 0, offset, None, value))
        offset += 1
        if len(records) == _BATCH_MAX:
            await processor.process(records)
            records.clear()
            await _wait_for_jobs(processor, VERDICT_JOB, _WAITING_MAX)
    await processor.process(records)
    await _wait_for_jobs(processor, VERDICT_JOB, 0)
    await processor.step(_expire_deadlines)
    while await _count_waiting(processor, DEADLINE_JOB):
        for timer in service.timers:
            await processor.step(timer.step)


async def _wait_for_jobs(processor: Processor, kind: str, waiting_max: int) -> None:
    """Wait until the queue has at most `waiting_max` jobs of this kind."""
    while await _count_waiting(processor, kind) > waiting_max:
        await processor.clock.sleep(_POLL_S)


async def _count_waiting(processor: Processor, kind: str) -> int:
    """Return the number of stored jobs of this kind."""
    return await transact(processor, lambda tx, _now: Jobs(STREAM).count(tx, kind))


async def _expire_deadlines(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
    """Set the deadlines of all runs to the past, because no more runs arrive in a replay."""
    await tx.execute(update(STREAM.jobs).where(STREAM.jobs.c.kind == DEADLINE_JOB).values(due_ms=0))
    return ()


async def _clear(database: Database) -> None:
    """Empty the database except for the budget and the cached verdicts."""
    async with database.transaction() as tx:
        for table in (STREAM.seen, STREAM.jobs, STREAM.outbox, STREAM.positions, CONTESTANTS, CONTESTS, PAIRS):
            await tx.execute(delete(table))


if __name__ == "__main__":
    SERVICE.main()
