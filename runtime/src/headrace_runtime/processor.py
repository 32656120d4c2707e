"""The core of a stream service, without Kafka and Faust: it turns records into effects and events.

One policy for all: decode or dead-letter; dedupe, effect, owed events and position in one transaction; retry what is
away; dead-letter what one record alone breaks; crash when retrying does not help. At least once plus idempotence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime import tracing
from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import Clock, epoch_ms
from headrace_runtime.database import Database
from headrace_runtime.dead_letters import dead_letter
from headrace_runtime.errors import DiskFull, HeadraceError, InvalidEvent, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.metrics import BATCH_SECONDS, EVENT_AGE_SECONDS, EVENTS_HANDLED, PAUSED, RETRIES
from headrace_runtime.outbox import Outbox
from headrace_runtime.refusal_limit import REMEDY, RefusalBounds, RefusalLimit
from headrace_runtime.stream_tables import StreamTables
from headrace_runtime.sweeping import remove_some
from headrace_runtime.upsert import upsert
from headrace_runtime.wire import Patience, Received, Record
from headrace_schemas import Event

log = get_logger(__name__)
_REST_S = 0.005
_BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Handling:
    """What a handler may use: the open transaction, the time, the record it handles, how far the logs reach.

    `ends` maps a topic to the end offset of each partition, read just before this batch; only for topics that the
    service asked for.
    """

    tx: AsyncConnection
    now: datetime
    received: Received
    ends: Mapping[str, Mapping[int, int]]


Handler = Callable[[Any, Handling], Awaitable[Sequence[Event]]]
"""`async (event, handling) -> events`: changes tables only through `handling.tx`, returns what is to be published.

It must be deterministic in the event and the tables. It may raise `InvalidEvent` (dead-letter this one) or
`Unavailable` (try the batch again); anything else is retried and then dead-lettered as `handler_error`.
"""

Step = Callable[[AsyncConnection, datetime], Awaitable[Sequence[Event]]]
"""Work without an event of its own: like a handler, but nothing can be dead-lettered for it.

It may raise `Unavailable`; anything else is a bug and stops the process.
"""


class Unfinished(list[Event]):
    """What a step returns when it has done as much as one transaction should: there is more of the same to do."""


Ends = Callable[[str], Awaitable[Mapping[int, int]]]


@dataclass(frozen=True, slots=True)
class ProcessorLimits:
    """Bounds of the policy; each is a setting of the service."""

    retry_s: float = 60.0
    """How long a batch is tried again while something is away, before the process gives up and is restarted."""
    attempts: int = 3
    """How often a record whose handler fails is tried before it is dead-lettered."""
    seen_for: timedelta = timedelta(days=8)
    """How long event ids are remembered; longer than the retention of what they dedupe."""
    refusals: RefusalBounds = field(default_factory=RefusalBounds)
    """How much may be refused before the consumer pauses."""


DEFAULT_LIMITS = ProcessorLimits()


class StepFailed(HeadraceError):
    """A step raised something that is no record's fault. Stops the process."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """A record that could not be decoded."""

    record: Record
    letter: Event


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
    """What follows from a batch as a whole: runs in its transaction, when `position` already includes it."""
    ends: Ends | None = None
    """Asks the bus for end offsets, raising `Unavailable`; set by the host."""
    paused: str | None = None
    """Why no record is handled any more, while that is so. Timers go on."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _refusals: RefusalLimit = field(init=False)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._refusals = RefusalLimit(self.limits.refusals)
        PAUSED.labels(self.service).set(0)

    async def process(self, records: Sequence[Record]) -> None:
        """Returns when every effect is durable and every event acknowledged. Raises when only a restart can help.

        When too much is refused it does not return before `resume`: what is held back is not acknowledged, so that a
        restart takes it up again.
        """
        rest = await self._take(records)
        while rest:
            await self._pause(rest[0])
            rest = await self._take(rest)

    async def _take(self, records: Sequence[Record]) -> list[Record]:
        rest: list[Record] = []

        async def handle() -> None:
            rest[:] = await self._handle(records)

        async with self._turn:
            with BATCH_SECONDS.time():
                await self._persist(handle)
                await self._persist(self.outbox.flush)
        return rest

    async def _pause(self, record: Record) -> None:
        self.paused = self._refusals.reason or "too many records were refused"
        self._resumed.clear()
        PAUSED.labels(self.service).set(1)
        place = f"{record.topic}[{record.partition}]@{record.offset}"
        log.error("consumer_paused", reason=self.paused, next=place, remedy=REMEDY)
        await self._resumed.wait()

    def resume(self) -> None:
        """Go on with what was held back; as much may be refused again before the next pause."""
        self._refusals.reset()
        self.paused = None
        PAUSED.labels(self.service).set(0)
        self._resumed.set()

    async def step(self, work: Step) -> bool:
        """Run timed work in a transaction of its own and publish what it returns. Whether there is more to do."""
        more = False

        async def noted(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            nonlocal more
            made = await _run(work, tx, now)
            more = isinstance(made, Unfinished)
            return made

        async with self._turn:
            await self._persist(lambda: self._commit([], work=noted))
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
        """Forget old ids and adopt orphaned outbox rows. Called every minute or so."""
        await in_turns(self.clock, lambda: self.step(self._forget_ids))
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
        """Returns those that are held back, from the first whose refusal would be one too many."""
        patience = Patience(self.clock)
        items = [await self._decode(record, patience) for record in records]
        admitted = self._refusals.admits([isinstance(item, _Refused) for item in items])
        try:
            await self._commit(items[:admitted])
        except (Unavailable, StepFailed):
            raise
        except Exception as error:  # noqa: BLE001 (find out which record it was)
            log.warning("batch_split", error=repr(error), size=admitted)
            for at, item in enumerate(items[:admitted]):
                # one by one and in order, so that `position` never promises what has yet to be done
                if not await self._handle_alone(item):
                    return list(records[at:])
        if admitted < len(items):
            self._refusals.note([True])  # so that `reason` says why
        return list(records[admitted:])

    async def _handle_alone(self, item: Received | _Refused) -> bool:
        """Whether it was dealt with; else its refusal would be one too many."""
        for attempt in range(1, self.limits.attempts + 1):
            try:
                await self._commit([item])
            except (Unavailable, StepFailed):
                raise
            except InvalidEvent as error:
                return await self._refuse(item, error.reason, str(error), attempt)
            except Exception as error:
                log.exception("handler_failed", topic=item.record.topic, offset=item.record.offset, attempt=attempt)
                if attempt == self.limits.attempts:
                    return await self._refuse(item, "handler_error", repr(error), attempt)
            else:
                return True
        raise AssertionError("unreachable")

    async def _refuse(self, item: Received | _Refused, reason: str, error: str, attempts: int) -> bool:
        if not self._refusals.admits([True]):
            self._refusals.note([True])
            return False
        event_id = item.envelope.id if isinstance(item, Received) else None
        letter = dead_letter(self.service, item.record, reason, error, attempts, event_id)
        await self._commit([_Refused(item.record, letter)])
        return True

    async def _decode(self, record: Record, patience: Patience) -> Received | _Refused:
        try:
            return await patience.decode(record, self.blobs)
        except InvalidEvent as error:
            return _Refused(record, dead_letter(self.service, record, error.reason, str(error)))

    async def _commit(self, items: Sequence[Received | _Refused], work: Step | None = None) -> None:
        received = [item for item in items if isinstance(item, Received)]
        ends = await self._ends(received)
        now = self.clock.now()
        try:
            async with self.database.transaction() as tx:
                owed = await self.outbox.encode(await self._new_letters(tx, items, now))
                for fresh in await self._unseen(tx, received, now):
                    with tracing.span(fresh.envelope.traceparent):
                        handler = self.handlers[fresh.event.topic]
                        owed += await self.outbox.encode(await handler(fresh.event, Handling(tx, now, fresh, ends)))
                await self._advance(tx, [item.record for item in items])
                for step in (work, self.after_batch if items else None):
                    if step is not None:
                        owed += await self.outbox.encode(await _run(step, tx, now))
                await self.outbox.add(tx, owed)
        except BaseException:
            self.outbox.rolled_back()
            raise
        self.outbox.committed()
        self._refusals.note([isinstance(item, _Refused) for item in items])
        for item in items:
            if isinstance(item, Received):
                age_s = (now - item.event.time).total_seconds()
                EVENT_AGE_SECONDS.labels(item.record.topic).observe(max(0.0, age_s))
            else:
                EVENTS_HANDLED.labels(item.record.topic, "refused").inc()

    async def _new_letters(
        self, tx: AsyncConnection, items: Sequence[Received | _Refused], now: datetime
    ) -> list[Event]:
        """Each record has one dead letter, however often it is delivered: its place is in the letter's id."""
        letters = {item.letter.event_id: item.letter for item in items if isinstance(item, _Refused)}
        if not letters:
            return []
        table = self.tables.seen
        known = set((await tx.execute(select(table.c.event_id).where(table.c.event_id.in_(letters)))).scalars())
        fresh = [letter for name, letter in letters.items() if name not in known]
        if fresh:
            at_ms = epoch_ms(now)
            await tx.execute(insert(table), [{"event_id": letter.event_id, "at_ms": at_ms} for letter in fresh])
        return fresh

    async def _unseen(self, tx: AsyncConnection, received: Sequence[Received], now: datetime) -> list[Received]:
        """Those whose id is new, each id once; the new ids are marked as seen in the same transaction."""
        first = {item.envelope.id: item for item in reversed(received)}
        if not first:
            return []
        table = self.tables.seen
        known = set((await tx.execute(select(table.c.event_id).where(table.c.event_id.in_(first)))).scalars())
        fresh = [item for item in received if item is first[item.envelope.id] and item.envelope.id not in known]
        if fresh:
            at_ms = epoch_ms(now)
            await tx.execute(insert(table), [{"event_id": item.envelope.id, "at_ms": at_ms} for item in fresh])
        kept = {id(item) for item in fresh}
        for item in received:
            EVENTS_HANDLED.labels(item.record.topic, "handled" if id(item) in kept else "duplicate").inc()
        return fresh

    async def _advance(self, tx: AsyncConnection, records: Sequence[Record]) -> None:
        reached: dict[tuple[str, int], int] = {}
        for record in records:
            place = (record.topic, record.partition)
            reached[place] = max(reached.get(place, 0), record.offset + 1)
        for (topic, partition), offset in reached.items():
            await upsert(tx, self.tables.positions, {"topic": topic, "partition": partition}, {"next_offset": offset})

    async def _ends(self, received: Sequence[Received]) -> dict[str, Mapping[int, int]]:
        wanted = {topic for item in received for topic in self.ends_of.get(item.record.topic, ())}
        if not wanted or self.ends is None:
            return {}
        return {topic: await self.ends(topic) for topic in sorted(wanted)}


async def in_turns(clock: Clock, work: Callable[[], Awaitable[bool]]) -> None:
    """Do `work` until it says that nothing is left, and rest as long as it took each time: the stream comes first."""
    while True:
        began = clock.monotonic_s()
        if not await work():
            return
        await clock.sleep(max(_REST_S, clock.monotonic_s() - began))


async def _run(step: Step, tx: AsyncConnection, now: datetime) -> Sequence[Event]:
    try:
        return await step(tx, now)
    except (Unavailable, StepFailed, SQLAlchemyError, OSError):
        raise  # `Database.transaction` knows which of them another try may mend
    except Exception as error:
        raise StepFailed(f"{getattr(step, '__qualname__', step)}: {error!r}") from error


async def position(tx: AsyncConnection, tables: StreamTables, topic: str) -> dict[int, int]:
    """How far the effects in this database reach: the next offset of each partition of `topic`."""
    table = tables.positions
    rows = await tx.execute(select(table.c.partition, table.c.next_offset).where(table.c.topic == topic))
    return {row.partition: row.next_offset for row in rows}


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
