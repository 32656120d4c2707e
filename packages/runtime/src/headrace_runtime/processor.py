"""The core of a stream service, without Kafka and Faust: it turns records into effects and events.

One policy for all: decode or dead-letter; dedupe, effect, owed events and position in one transaction; retry what is
away; dead-letter what one record alone breaks; crash when retrying does not help. At least once plus idempotence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime import delivery, tracing
from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.database import Database
from headrace_runtime.dead_letters import dead_letter
from headrace_runtime.delivery import position
from headrace_runtime.disk import DiskGuard
from headrace_runtime.errors import DiskFull, InvalidEvent, Unavailable
from headrace_runtime.held_records import HeldRecords
from headrace_runtime.isolation import is_fatal, isolate, reason_of
from headrace_runtime.logs import get_logger
from headrace_runtime.metrics import BATCH_SECONDS, EVENT_AGE_SECONDS, EVENTS_HANDLED, PAUSED, RETRIES, STEPS_FAILED
from headrace_runtime.outbox import Outbox
from headrace_runtime.refusal_limit import REMEDY, TenantLimits
from headrace_runtime.steps import (
    DEFAULT_LIMITS,
    Ends,
    Handler,
    Handling,
    ProcessorLimits,
    Step,
    StepFailed,
    Unfinished,
    in_turns,
)
from headrace_runtime.stream_tables import StreamTables
from headrace_runtime.sweeping import remove_some
from headrace_runtime.upsert import upsert
from headrace_runtime.wire import Outgoing, Patience, Received, Record, tenant_of
from headrace_schemas import DeadLetter, Event

log = get_logger(__name__)
_BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class _Refused:
    """A record that is dead-lettered."""

    record: Record
    tenant: str
    write: Callable[[], DeadLetter]

    @cached_property
    def letter(self) -> DeadLetter:
        """Its dead letter, which is counted and logged once."""
        return self.write()


@dataclass(frozen=True, slots=True)
class _Held:
    """A record that is kept back, because too much of its tenant was refused."""

    record: Record
    tenant: str


_Item = Received | _Refused | _Held


@dataclass(slots=True)
class Processor:
    """Runs handlers over batches. `process` and `step` never overlap; any task may call them."""

    service: str
    handlers: Mapping[str, Handler]
    database: Database
    tables: StreamTables
    outbox: Outbox
    blobs: BlobStore
    clock: Clock
    limits: ProcessorLimits = DEFAULT_LIMITS
    ends_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Topic to the topics whose end offsets its handler wants to know."""
    after_batch: Step | None = None
    """What follows from a batch as a whole: runs in its transaction, when `position` already includes it. One
    that fails with its items isolated is left out, so a timer should run it, too, or it may be missed."""
    ends: Ends | None = None
    """Asks the bus for end offsets, raising `Unavailable`; set by the host."""
    disk: DiskGuard | None = None
    """Of the disk that the database grows on: no batch begins while it is short. Timers go on, which make room."""
    paused: str | None = None
    """Why the consumer may be broken: refusals are kept back, and nobody's records are handled. Timers go on."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _limits: TenantLimits = field(init=False)
    _held: HeldRecords = field(init=False)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._limits = TenantLimits(self.limits.refusals)
        self._held = HeldRecords(self.service, self.tables)
        PAUSED.labels(self.service).set(0)

    async def process(self, records: Sequence[Record]) -> None:
        """Return once every effect is durable and every event acknowledged. Raise when only a restart can help.

        Refusals of a tenant beyond its bounds are kept in the database. Where they have no room and the consumer itself
        may be broken, this does not return before `resume`: the rest is not acknowledged, so a restart reads it again.
        """
        if self.disk is not None:
            await self.disk.wait_for_room()
        rest = await self._take(records)
        while rest:
            await self._resumed.wait()
            rest = await self._take(rest)

    async def _take(self, records: Sequence[Record]) -> list[Record]:
        rest: list[Record] = []

        async def handle() -> None:
            if self._held.is_due:
                await self._handle_held()
            rest[:] = await self._handle(records)

        async with self._turn:
            with BATCH_SECONDS.time():
                await self._persist(handle)
                await self._persist(self.outbox.flush)
        return rest

    def resume(self) -> None:
        """Try again what was kept back, and go on; as much may be refused again before the next pause."""
        self._limits.reset()
        self._held.is_due = True
        self._report(None)
        self._resumed.set()

    def _report(self, record: Record | None) -> None:
        """Update `paused` after `record`."""
        paused = self._limits.paused
        if paused is not None and self.paused is None and record is not None:
            log.error("consumer_paused", reason=paused, next=_place(record), remedy=REMEDY)
        self.paused = paused
        PAUSED.labels(self.service).set(paused is not None)

    async def step(self, work: Step) -> bool:
        """Run timed work in a transaction of its own and publish what it returns. Whether there is more to do."""
        more = False

        async def noted(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            nonlocal more
            events = await work(tx, now)
            more = isinstance(events, Unfinished)
            return events

        noted.__qualname__ = getattr(work, "__qualname__", repr(work))
        async with self._turn:
            try:
                await self._persist(lambda: self._commit([], noted))
            except StepFailed as error:
                log.warning("step_isolated", error=str(error))
                await self._persist(lambda: self._commit([], noted, isolated=True))
            await self._persist(self.outbox.flush)
        return more

    async def recover(self, starts: Mapping[tuple[str, int], int] | None = None) -> None:
        """Send what a crash left in the outbox. Called once, before the first batch.

        `starts` tells from where each (topic, partition) will be read. A database that knows no position yet takes it
        from there, so that `position` reaches an end also where nothing is left to read.
        """
        if starts:
            async with self.database.transaction() as tx:
                for (topic, partition), offset in starts.items():
                    place = {"topic": topic, "partition": partition}
                    await upsert(tx, self.tables.positions, place, {"next_offset": offset}, update=False)
        async with self._turn:
            adopted = await self.outbox.adopt(at_start=True)
        if adopted:
            log.info("outbox_adopted", rows=adopted)

    async def prune(self) -> None:
        """Forget old ids, adopt orphaned outbox rows, try again what `resume` released. Called every minute or so."""
        await in_turns(self.clock, lambda: self.step(self._forget_ids))
        while self._held.is_due:
            await self._take([])
        async with self._turn:
            await self.outbox.adopt()

    async def _forget_ids(self, tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        seen = self.tables.seen
        old = seen.c.at_ms < epoch_ms(now - self.limits.seen_for)
        return Unfinished() if await remove_some(tx, seen, old, order=seen.c.at_ms) else []

    async def _persist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Until it works or `retry_s` is over; a restart would not make room on a full disk, so that is waited for."""
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
        """Return the records from the first on that can be neither refused nor kept back."""
        patience = Patience(self.clock)
        items = [await self._decode(record, patience) for record in records]
        if self._limits.admit_all(item.tenant for item in items if isinstance(item, _Refused)):
            try:
                await self._commit_batch(items)
                return []
            except Exception as error:
                if is_fatal(error):
                    raise
                log.warning("batch_split", error=reason_of(error), size=len(items))
        for at, item in enumerate(items):
            # one by one and in order, so that `position` never promises what has yet to be done
            if not await self._handle_alone(item):
                return list(records[at:])
        return []

    async def _handle_held(self) -> None:
        """Try again the next of the records that were kept back, but not of tenants that are over their bounds."""
        page = await self._held.page(self.database)
        patience = Patience(self.clock)
        for row in page:
            if self._limits.admits(row.tenant):
                await self._handle_alone(await self._decode(row.record, patience), row.name)
            else:
                self._held.count(row.tenant, row.record)
        self._held.turn(page)

    async def _handle_alone(self, item: Received | _Refused, held: str | None = None) -> bool:
        """Return whether the item was dealt with. `held` names its row if it was kept back before."""
        if isinstance(item, _Refused):
            return await self._refuse(item, held)
        reason, text, attempt = "handler_error", "", 0
        while attempt < self.limits.attempts:
            attempt += 1
            try:
                await self._commit_batch([item], held, isolated=True)
                return True
            except InvalidEvent as error:
                reason, text = error.reason, str(error)
                break
            except Exception as error:
                if is_fatal(error):
                    raise
                log.exception("handler_failed", topic=item.record.topic, offset=item.record.offset, attempt=attempt)
                text = reason_of(error)
        return await self._refuse(self._refused(item.record, reason, text, item, attempt), held)

    async def _refuse(self, item: _Refused, held: str | None) -> bool:
        """Dead-letter the item, or keep it back when its tenant is over its bounds. False: neither is possible now."""
        if self._limits.admits(item.tenant):
            await self._commit_batch([item], held)
            return True
        reason = self._limits.exceed(item.tenant)
        if reason is not None:
            where = {"tenant": item.tenant or None, "next": _place(item.record), "remedy": REMEDY}
            log.error("refusals_held", reason=reason, **where)
        self._report(item.record)
        if held is not None:
            self._held.count(item.tenant, item.record)
        elif self._held.has_room(item.tenant, item.record):
            await self._commit_batch([_Held(item.record, item.tenant)])
        elif self.paused is None:
            await self._commit_batch([item])
        else:
            self._resumed.clear()
            return False
        return True

    def _refused(
        self, record: Record, reason: str, error: str, received: Received | None = None, attempts: int = 1
    ) -> _Refused:
        event_id = None if received is None else received.envelope.id
        letter = partial(dead_letter, self.service, record, reason, error, attempts, event_id)
        return _Refused(record, tenant_of(received or record), letter)

    async def _decode(self, record: Record, patience: Patience) -> Received | _Refused:
        try:
            return await patience.decode(record, self.blobs)
        except InvalidEvent as error:
            return self._refused(record, error.reason, str(error))
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("decoding_failed", topic=record.topic, offset=record.offset)
            return self._refused(record, "undecodable", reason_of(error))

    async def _commit_batch(self, items: Sequence[_Item], held: str | None = None, *, isolated: bool = False) -> None:
        """Commit with `after_batch`: as it is, then with its items isolated, then without it."""
        step = self.after_batch if items else None
        for isolates in (True,) if isolated else (False, True):
            try:
                return await self._commit(items, step, held=held, isolated=isolates)
            except StepFailed as error:
                log.warning("step_failed" if isolates else "step_isolated", error=str(error))
        STEPS_FAILED.labels(self.service).inc()
        return await self._commit(items, held=held, isolated=isolated)

    async def _commit(
        self, items: Sequence[_Item], step: Step | None = None, *, held: str | None = None, isolated: bool = False
    ) -> None:
        """Commit the effects of `items`, then those of `step`. Raises `StepFailed` for what the step raises.

        Args:
            held: names the row of the only item, which was kept back and whose offset was passed before.
            isolated: whether the items of handlers and of the step are isolated.
        """
        received = [item for item in items if isinstance(item, Received)]
        ends = await self._ends(received)
        now = self.clock.now()
        try:
            async with self.database.transaction() as tx:
                if isolated:
                    await isolate(tx, self.outbox.encode)
                letters = [item.letter for item in items if isinstance(item, _Refused)]
                owed = await self.outbox.encode(await delivery.new_letters(tx, self.tables, letters, now))
                for fresh in await delivery.unseen(tx, self.tables, received, now):
                    with tracing.span(fresh.envelope.traceparent):
                        handler = self.handlers[fresh.event.topic]
                        owed += await self.outbox.encode(await handler(fresh.event, Handling(tx, now, fresh, ends)))
                for item in items:
                    if isinstance(item, _Held):
                        await self._held.keep(tx, item.tenant, item.record, now)
                if held is None:
                    await delivery.advance(tx, self.tables, [item.record for item in items])
                else:
                    await self._held.remove(tx, held)
                if step is not None:
                    owed += await self._run(step, tx, now)
                await self.outbox.add(tx, owed)
        except BaseException:
            self.outbox.rolled_back()
            raise
        self.outbox.committed()
        self._note(items, now)

    def _note(self, items: Sequence[_Item], now: datetime) -> None:
        """Count items whose effect is durable."""
        for item in items:
            if isinstance(item, Received):
                self._limits.note(tenant_of(item), refused=False)
                age_s = (now - item.event.time).total_seconds()
                EVENT_AGE_SECONDS.labels(item.record.topic).observe(max(0.0, age_s))
            elif isinstance(item, _Refused):
                self._limits.note(item.tenant, refused=True)
                EVENTS_HANDLED.labels(item.record.topic, "refused").inc()
            else:
                self._held.count(item.tenant, item.record)
                EVENTS_HANDLED.labels(item.record.topic, "held").inc()
        if items:
            self._report(items[-1].record)

    async def _run(self, step: Step, tx: AsyncConnection, now: datetime) -> list[Outgoing]:
        try:
            return await self.outbox.encode(await step(tx, now))
        except Exception as error:
            if isinstance(error, StepFailed) or is_fatal(error):
                raise  # `Database.transaction` turns what another try may mend into `Unavailable`
            raise StepFailed(f"{getattr(step, '__qualname__', step)}: {reason_of(error)}") from error

    async def _ends(self, received: Sequence[Received]) -> dict[str, Mapping[int, int]]:
        wanted = {topic for item in received for topic in self.ends_of.get(item.record.topic, ())}
        if not wanted or self.ends is None:
            return {}
        return {topic: await self.ends(topic) for topic in sorted(wanted)}


def _place(record: Record) -> str:
    return f"{record.topic}[{record.partition}]@{record.offset}"


__all__ = [
    "Handler",
    "Handling",
    "Processor",
    "ProcessorLimits",
    "Step",
    "StepFailed",
    "Unfinished",
    "in_turns",
    "position",
]
