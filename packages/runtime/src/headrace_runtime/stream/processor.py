"""Core of a stream service, without Kafka and Faust: it turns records into effects in the database and events.

All services share one policy. A record is decoded or dead-lettered. Deduplication, effect, outgoing events and position
commit in one transaction. If a dependency is unavailable, the batch is retried, and the process exits if retries fail.
A record that makes its handler fail even alone is dead-lettered. So delivery is at least once, and effects are
idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.errors import DiskFull, InvalidEvent, Unavailable
from headrace_runtime.kafka.dead_letters import RefusedRecord, dead_letter
from headrace_runtime.kafka.wire import BatchDecoder, Outgoing, Received, Record, tenant_of
from headrace_runtime.metrics import BATCH_SECONDS, EVENT_AGE_SECONDS, EVENTS_HANDLED, PAUSED, RETRIES, STEPS_FAILED
from headrace_runtime.process import logs
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_runtime.storage.disk import DiskGuard
from headrace_runtime.storage.isolation import is_fatal, isolate, reason_of
from headrace_runtime.storage.tables import StreamTables, delete_batch, upsert
from headrace_runtime.stream import delivery
from headrace_runtime.stream.delivery import HeldRecords, Outbox, RecordToHold, read_positions
from headrace_runtime.stream.pausing import REMEDY, TenantLimits
from headrace_runtime.stream.steps import (
    DEFAULT_LIMITS,
    Ends,
    Handler,
    Handling,
    ProcessorLimits,
    Step,
    StepFailed,
    Unfinished,
    run_until_finished,
)
from headrace_schemas import Event

log = get_logger(__name__)
_BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


_Item = Received | RefusedRecord | RecordToHold


@dataclass(slots=True)
class Processor:
    """Executor of a service's record handlers (`process`) and other work (`step`). Concurrent calls run in turn."""

    service: str
    handlers: Mapping[str, Handler]
    database: Database
    tables: StreamTables
    outbox: Outbox
    blobs: BlobStore
    clock: Clock
    limits: ProcessorLimits = DEFAULT_LIMITS
    ends_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each topic, the topics whose end offsets the handler of its records needs."""
    after_batch: Step | None = None
    """Step that runs after each batch, in the batch's transaction, when the stored positions already include the batch.
    If it fails even with isolated items, it is skipped, so a timer should run it, too."""
    ends: Ends | None = None
    """Function that reads the end offsets of a topic from the bus, or raises `Unavailable`. The host sets it."""
    disk: DiskGuard | None = None
    """Free-space check of the database's disk. No batch begins during a shortage. Timers, which free space, run."""
    paused: str | None = None
    """Reason why the consumer itself may be broken, so that refused records are held, or None. Timers still run."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _limits: TenantLimits = field(init=False)
    _held_records: HeldRecords = field(init=False)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._limits = TenantLimits(self.limits.refusals)
        self._held_records = HeldRecords(self.service, self.tables)
        PAUSED.labels(self.service).set(0)

    async def process(self, records: Sequence[Record]) -> None:
        """Process records, and return once all effects are durable and all events are acknowledged.

        Refused records of a tenant that exceeds its limits are held in the database. If too many are held and the
        consumer itself may be broken, this waits until `resume` is called. The remaining records are not acknowledged,
        so a restart reads them again.

        Raises:
            Exception: the processor cannot continue; the process must be restarted.
        """
        if self.disk is not None:
            await self.disk.wait_for_room()
        remaining = await self._process(records)
        while remaining:
            await self._resumed.wait()
            remaining = await self._process(remaining)

    async def _process(self, records: Sequence[Record]) -> list[Record]:
        """Process due held records, then `records`. Return those that cannot be processed before `resume`."""
        remaining: list[Record] = []

        async def handle() -> None:
            if self._held_records.is_due:
                await self._retry_held()
            remaining[:] = await self._handle(records)

        async with self._turn:
            with BATCH_SECONDS.time():
                await self._persist(handle)
                await self._persist(self.outbox.flush)
        return remaining

    def resume(self) -> None:
        """Set the counters of refused records to zero, retry held records, and continue."""
        self._limits.reset()
        self._held_records.is_due = True
        self._report(None)
        self._resumed.set()

    def _report(self, record: Record | None) -> None:
        """Set `paused` and its metric to the present state of the limits. Log the beginning of a pause.

        Args:
            record: the next record to be processed, whose position is logged; None for no log entry.
        """
        paused = self._limits.paused
        if paused is not None and self.paused is None and record is not None:
            log.error("consumer_paused", reason=paused, next=_position_of(record), remedy=REMEDY)
        self.paused = paused
        PAUSED.labels(self.service).set(paused is not None)

    async def step(self, work: Step) -> bool:
        """Run `work` in a transaction, publish the events that it returns, and return whether work remains."""
        is_unfinished = False

        async def run_work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            nonlocal is_unfinished
            events = await work(tx, now)
            is_unfinished = isinstance(events, Unfinished)
            return events

        run_work.__qualname__ = getattr(work, "__qualname__", repr(work))
        async with self._turn:
            try:
                await self._persist(lambda: self._commit([], run_work, isolated=False))
            except StepFailed as error:
                log.warning("step_isolated", error=str(error))
                await self._persist(lambda: self._commit([], run_work, isolated=True))
            await self._persist(self.outbox.flush)
        return is_unfinished

    async def recover(self, starts: Mapping[tuple[str, int], int] | None = None) -> None:
        """Send the events that a crash left in the outbox. Must be called once, before the first batch.

        Args:
            starts: the offset at which each (topic, partition) will be read. It initialises missing positions in the
                database, so that the positions reach the end even if there are no records to read.
        """
        if starts:
            async with self.database.transaction() as tx:
                for (topic, partition), offset in starts.items():
                    key = {"topic": topic, "partition": partition}
                    await upsert(tx, self.tables.positions, key, {"next_offset": offset}, update=False)
        async with self._turn:
            adopted = await self.outbox.adopt(at_start=True)
        if adopted:
            log.info("outbox_adopted", rows=adopted)

    async def prune(self) -> None:
        """Delete old event ids, send orphaned events, and retry held records. Called about once a minute."""
        await run_until_finished(self.clock, lambda: self.step(self._forget_ids))
        while self._held_records.is_due:
            await self._process([])
        async with self._turn:
            await self.outbox.adopt()

    async def _forget_ids(self, tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        seen = self.tables.seen
        old = seen.c.at_ms < epoch_ms(now - self.limits.seen_for)
        return Unfinished() if await delete_batch(tx, seen, old, order=seen.c.at_ms) else []

    async def _persist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, and repeat it while a dependency is unavailable, for at most `retry_s`.

        While a disk is full it is repeated without a time limit, because a restart would not help.
        """
        deadline = self.clock.monotonic_s() + self.limits.retry_s
        attempt = 0
        while True:
            try:
                return await work()
            except Unavailable as error:
                if self.clock.monotonic_s() > deadline and not isinstance(error, DiskFull):
                    raise
                RETRIES.labels(self.service).inc()
                log.warning("retrying", error=str(error), attempt=attempt)
            await self.clock.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1

    async def _handle(self, records: Sequence[Record]) -> list[Record]:
        """Process records in one transaction, or one by one if that fails. Return the remaining records if one can be
        neither dead-lettered nor held."""
        decoder = BatchDecoder(self.clock)
        items = [await self._decode(record, decoder) for record in records]
        if self._limits.admit_all(item.tenant for item in items if isinstance(item, RefusedRecord)):
            try:
                await self._commit_batch(items)
                return []
            except Exception as error:
                if is_fatal(error):
                    raise
                log.warning("batch_split", error=reason_of(error), size=len(items))
        for at, item in enumerate(items):
            # one by one and in order, so that the positions never include unprocessed records
            if not await self._handle_alone(item):
                return list(records[at:])
        return []

    async def _retry_held(self) -> None:
        """Retry the next page of held records, except those of tenants that exceed their limits."""
        page = await self._held_records.page(self.database)
        decoder = BatchDecoder(self.clock)
        for row in page:
            if self._limits.admits(row.tenant):
                await self._handle_alone(await self._decode(row.record, decoder), row.name)
            else:
                self._held_records.count(row.tenant, row.record)
        self._held_records.advance(page)

    async def _handle_alone(self, item: Received | RefusedRecord, held_row: str | None = None) -> bool:
        """Process one item, and return False if it can be neither processed nor refused. `held_row` is the row id if it
        is a held record."""
        if isinstance(item, RefusedRecord):
            return await self._refuse(item, held_row)
        reason, text, attempt = "handler_error", "", 0
        while attempt < self.limits.attempts:
            attempt += 1
            try:
                await self._commit_batch([item], held_row, isolated=True)
                return True
            except InvalidEvent as error:
                reason, text = error.reason, str(error)
                break
            except Exception as error:
                if is_fatal(error):
                    raise
                log.exception("handler_failed", topic=item.record.topic, offset=item.record.offset, attempt=attempt)
                text = reason_of(error)
        return await self._refuse(self._refused_record(item.record, reason, text, item, attempt), held_row)

    async def _refuse(self, item: RefusedRecord, held_row: str | None) -> bool:
        """Dead-letter the item, or hold it if its tenant exceeds its limits. Return False if neither is possible."""
        if self._limits.admits(item.tenant):
            await self._commit_batch([item], held_row)
            return True
        reason = self._limits.note_held(item.tenant)
        if reason is not None:
            context = {"tenant": item.tenant or None, "next": _position_of(item.record), "remedy": REMEDY}
            log.error("refusals_held", reason=reason, **context)
        self._report(item.record)
        if held_row is not None:
            self._held_records.count(item.tenant, item.record)
        elif self._held_records.has_capacity(item.tenant, item.record):
            await self._commit_batch([RecordToHold(item.record, item.tenant)])
        elif self.paused is None:
            await self._commit_batch([item])
        else:
            self._resumed.clear()
            return False
        return True

    def _refused_record(
        self, record: Record, reason: str, error: str, received: Received | None = None, attempts: int = 1
    ) -> RefusedRecord:
        event_id = None if received is None else received.envelope.id
        letter = partial(dead_letter, self.service, record, reason, error, attempts, event_id)
        return RefusedRecord(record, tenant_of(received or record), letter)

    async def _decode(self, record: Record, decoder: BatchDecoder) -> Received | RefusedRecord:
        try:
            return await decoder.decode(record, self.blobs)
        except InvalidEvent as error:
            return self._refused_record(record, error.reason, str(error))
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("decoding_failed", topic=record.topic, offset=record.offset)
            return self._refused_record(record, "undecodable", reason_of(error))

    async def _commit_batch(
        self, items: Sequence[_Item], held_row: str | None = None, *, isolated: bool = False
    ) -> None:
        """Commit items together with the step `after_batch`. If the step fails, run it with isolated items, and if it
        fails again, commit without it."""
        step = self.after_batch if items else None
        for isolate_step in (True,) if isolated else (False, True):
            try:
                return await self._commit(items, step, held_row=held_row, isolated=isolate_step)
            except StepFailed as error:
                log.warning("step_failed" if isolate_step else "step_isolated", error=str(error))
        STEPS_FAILED.labels(self.service).inc()
        return await self._commit(items, held_row=held_row, isolated=isolated)

    async def _commit(
        self, items: Sequence[_Item], step: Step | None = None, *, isolated: bool, held_row: str | None = None
    ) -> None:
        """Handle items and run `step`, in one database transaction, and send the resulting events.

        Args:
            items: decoded records to handle, and refused records to dead-letter or hold.
            step: further work in the same transaction.
            isolated: whether handlers and the step process each item in isolation, so that a failing item does not undo
                the others.
            held_row: row id if the only item is a held record. The stored position is already after it.

        Raises:
            StepFailed: the step has raised an exception.
        """
        received = [item for item in items if isinstance(item, Received)]
        ends = await self._ends(received)
        now = self.clock.now()
        try:
            async with self.database.transaction() as tx:
                if isolated:
                    await isolate(tx, self.outbox.encode)
                letters = [item.letter for item in items if isinstance(item, RefusedRecord)]
                outgoing = await self.outbox.encode(await delivery.select_new_letters(tx, self.tables, letters, now))
                for new in await delivery.select_new_events(tx, self.tables, received, now):
                    with logs.span(new.envelope.traceparent):
                        handler = self.handlers[new.event.topic]
                        outgoing += await self.outbox.encode(await handler(new.event, Handling(tx, now, new, ends)))
                for item in items:
                    if isinstance(item, RecordToHold):
                        await self._held_records.hold(tx, item.tenant, item.record, now)
                if held_row is None:
                    await delivery.store_positions(tx, self.tables, [item.record for item in items])
                else:
                    await self._held_records.remove(tx, held_row)
                if step is not None:
                    outgoing += await self._run(step, tx, now)
                await self.outbox.add(tx, outgoing)
        except BaseException:
            self.outbox.mark_rolled_back()
            raise
        self.outbox.mark_committed()
        self._note(items, now)

    def _note(self, items: Sequence[_Item], now: datetime) -> None:
        """Count the outcomes of committed items in metrics and in the tenants' limits."""
        for item in items:
            if isinstance(item, Received):
                self._limits.note(tenant_of(item), refused=False)
                age_s = (now - item.event.time).total_seconds()
                EVENT_AGE_SECONDS.labels(item.record.topic).observe(max(0.0, age_s))
            elif isinstance(item, RefusedRecord):
                self._limits.note(item.tenant, refused=True)
                EVENTS_HANDLED.labels(item.record.topic, "refused").inc()
            else:
                self._held_records.count(item.tenant, item.record)
                EVENTS_HANDLED.labels(item.record.topic, "held").inc()
        if items:
            self._report(items[-1].record)

    async def _run(self, step: Step, tx: AsyncConnection, now: datetime) -> list[Outgoing]:
        try:
            return await self.outbox.encode(await step(tx, now))
        except Exception as error:
            if isinstance(error, StepFailed) or is_fatal(error):
                raise  # `Database.transaction` converts transient errors into `Unavailable`
            raise StepFailed(f"{getattr(step, '__qualname__', step)}: {reason_of(error)}") from error

    async def _ends(self, received: Sequence[Received]) -> dict[str, Mapping[int, int]]:
        """Return, by topic, the end offsets that the handlers of `received` need."""
        topics = {topic for item in received for topic in self.ends_of.get(item.record.topic, ())}
        if not topics or self.ends is None:
            return {}
        return {topic: await self.ends(topic) for topic in sorted(topics)}


def _position_of(record: Record) -> str:
    return f"{record.topic}[{record.partition}]@{record.offset}"


__all__ = [
    "Handler",
    "Handling",
    "Processor",
    "ProcessorLimits",
    "Step",
    "StepFailed",
    "Unfinished",
    "read_positions",
    "run_until_finished",
]
