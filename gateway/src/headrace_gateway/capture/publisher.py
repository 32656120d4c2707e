"""Publisher of events to the bus, or to the spool on the disk while the bus is unavailable. `publish` returns once the
events are durable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

from headrace_gateway import metrics
from headrace_gateway.access.refusals import overloaded_error
from headrace_gateway.capture.spool import Shares, Spool, Spooled, split_into_stages
from headrace_gateway.requests.feedback import Ends, LogEnds, end_offsets_of
from headrace_gateway.settings import CaptureSettings
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, Record
from headrace_runtime.process import logs
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import TRIES, is_fatal, reason_of
from headrace_schemas import EVENTS, Event, Feedback, SessionEnd

DRAIN_BATCH = 200
"""Spooled events that are sent to the bus at one time."""

TENANT_SHARE = 0.5
"""Part of the spool that one tenant may fill if keys belong to several tenants. Beyond it the tenant's requests are
refused."""

log = get_logger(__name__)
_STOP_TIMEOUT_S = 1.0
_RECONNECT_S = 0.5
_DAMAGED_BYTES_MAX = 700_000
"""Maximum bytes of a damaged record that its dead letter contains."""
Span = contextlib.AbstractContextManager[object]


class Publisher:
    """Publisher that sends events directly to the bus while the spool is empty.

    Otherwise all events pass through the spool, so that the events of a session keep their order. An event may reach
    the bus twice with the same id, after a late acknowledgement or a crash.
    """

    def __init__(
        self,
        producer: Callable[[], EventProducer],
        spool: Spool,
        settings: CaptureSettings,
        *,
        send_timeout_s: float,
        prepare: Callable[[], Awaitable[None]] | None = None,
        log_ends: Callable[[], LogEnds] | None = None,
        tenants: int = 1,
    ) -> None:
        """Create the publisher.

        Args:
            producer: Function that creates a producer for each connection to the bus.
            prepare: Function that creates missing topics, called before each connection.
            log_ends: Function that creates the reader of end offsets, which feedback about a session contains.
            tenants: The number of tenants that share the spool.
        """
        self._make = producer
        self._spool = spool
        self._settings = settings
        self._send_timeout_s = send_timeout_s
        self._prepare = prepare
        self._make_log_ends = log_ends
        self._shared = tenants > 1
        self._shares = Shares()
        self._producer: EventProducer | None = None
        self._log_ends: LogEnds | None = None
        self._away = False
        self._spooled = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._producer is not None

    @property
    def refusal_reason(self) -> str | None:
        """Reason why events of new requests could not be stored durably (spool at its limit, or disk full), or None."""
        if self._spool.full:
            return f"the spool is full {self._backlog_reason()}; capture.spool_bytes_max bounds it"
        away = self._producer is None or self._spool.events > 0
        return self._spool.trouble if away else None

    def admit(self, tenant: str) -> None:
        """Check that events of a new request of `tenant` could be stored durably. Raises `ApiError` 503."""
        lack = self.refusal_reason
        if lack is not None:
            raise overloaded_error(lack)
        share = self._settings.spool_bytes_max * TENANT_SHARE
        if self._shared and self._shares.of(tenant) >= share:
            raise overloaded_error(
                f"this tenant's part of the spool (half of capture.spool_bytes_max) is full {self._backlog_reason()}"
            )

    def _backlog_reason(self) -> str:
        """Return a clause for messages that explains why events wait in the spool."""
        if self._away or self._producer is None:
            return "and the bus is unavailable"
        return "and is being sent to the bus, which is available again; try again"

    async def publish(self, *events: Event) -> None:
        """Publish `events`, and return once all are durable.

        Raises `Unavailable` if neither the bus nor the disk accepts them. In this case none of them is sent later,
        because the producer is dropped with its unsent events.
        """
        if self._spool.events == 0 and self._producer is not None:
            try:
                async with asyncio.timeout(self._settings.bus_wait_s):
                    await self._send(self._producer, [(event, None) for event in events])
                self._count(events, "bus")
                self._away = False
                return
            except (Unavailable, TimeoutError) as error:
                self._away = True
                log.warning("bus_away", error=repr(error), remedy="events go to the spool until it is back")
        spooled = [Spooled(event.topic, event.to_json(), logs.current_traceparent()) for event in events]
        self._shares.add(spooled)
        try:
            await self._spool.append(spooled)
        except Unavailable:
            self._shares.remove(spooled)
            await self._give_up_producer()
            raise
        self._count(events, "spool")
        self._spooled.set()

    async def _give_up_producer(self) -> None:
        """Drop the producer with its unsent events. Their clients were told that they are not recorded, but aiokafka
        would keep retrying them."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.abandon()
        self._spooled.set()

    async def run(self) -> None:
        """Keep a connection to the bus and send the spooled events, until the task is cancelled."""
        self._shares.load(await self._spool.tenants())
        while True:
            try:
                async with self._connection() as producer:
                    await self._drain(producer)
            except (Unavailable, TimeoutError) as error:
                log.warning("bus_reconnect", error=repr(error), spooled=self._spool.events)
                await asyncio.sleep(_RECONNECT_S)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[EventProducer]:
        producer = self._make()
        async with asyncio.timeout(self._send_timeout_s):
            if self._prepare is not None:
                await self._prepare()
            await producer.start()
            if self._make_log_ends is not None:
                self._log_ends = self._make_log_ends()
                await self._log_ends.start()
        self._producer = producer
        try:
            yield producer
        finally:
            self._producer = None
            with contextlib.suppress(
                TimeoutError
            ):  # it would flush events that are durable already, and never return without a bus
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await producer.stop()
                    if self._log_ends is not None:
                        await self._log_ends.stop()

    async def _drain(self, producer: EventProducer) -> None:
        while True:
            self._spooled.clear()
            if self._producer is not producer:
                raise Unavailable("the connection was given up, with what it had not yet sent")
            while self._spool.events:
                batch = await self._spool.oldest(DRAIN_BATCH)
                if not batch:  # its event is still being written to the disk
                    await asyncio.sleep(0.01)
                    continue
                await self._wait_until_sent(self._send_spooled(producer, batch))
                await self._spool.remove(batch)
                self._shares.remove(batch)
                log.info("spool_drained", sent=len(batch), left=self._spool.events)
            await self._spooled.wait()

    async def _wait_until_sent(self, sending: Coroutine[None, None, None]) -> None:
        """Wait for `sending` without a time limit, while the bus may be unavailable.

        aiokafka retries by itself, and a producer that is dropped during a retry would never end. If the bus has lost
        its topics, they are created again.
        """
        task = asyncio.create_task(sending)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self._send_timeout_s)
                self._away = not task.done()
                if not task.done() and self._prepare is not None:
                    with contextlib.suppress(Unavailable, TimeoutError):
                        async with asyncio.timeout(self._send_timeout_s):
                            await self._prepare()
            task.result()
        finally:
            task.cancel()

    async def _send_spooled(self, producer: EventProducer, batch: Sequence[Spooled]) -> None:
        """Send spooled events in stages, because the end of a session may be sent only once the turns of the session
        are acknowledged. If that fails for another reason than the bus, send each event alone."""
        read = [(_event(item), logs.span(item.traceparent)) for item in batch]
        try:
            for stage in split_into_stages(read, lambda pair: pair[0]):
                await self._send(producer, stage)
        except Exception as error:
            if is_fatal(error):
                raise
            log.warning("spool_split", error=reason_of(error), size=len(batch))
            for item in batch:
                await self._send_alone(producer, item)

    async def _send_alone(self, producer: EventProducer, item: Spooled) -> None:
        """Send one spooled event. After three failed attempts send its dead letter instead, so that the events after it
        are not blocked."""
        reason = ""
        for _ in range(TRIES):
            try:
                return await self._send(producer, [(_event(item), logs.span(item.traceparent))])
            except Exception as error:
                if is_fatal(error):
                    raise
                reason = reason_of(error)
        record = Record(item.topic, -1, -1, None, item.value[:_DAMAGED_BYTES_MAX])
        return await self._send(producer, [(dead_letter("gateway", record, "unsendable", reason), None)])

    async def _send(self, producer: EventProducer, events: Sequence[tuple[Event, Span | None]]) -> None:
        """Send each event within its trace span. Events without a span belong to the span of the current request."""
        ends = await self._ends([event for event, _ in events])
        records: list[Outgoing] = []
        for number, (event, span) in enumerate(events):
            with span or contextlib.nullcontext():
                records += await _records(producer, event, ends)
            if number:
                await asyncio.sleep(0)  # other requests run between the many events of one request
        await producer.send_raw(records)

    async def _ends(self, events: Sequence[Event]) -> Ends:
        """Return the end offsets of the topics if one of `events` must contain them, else an empty mapping."""
        if self._log_ends is None or not any(_is_about_session(event) for event in events):
            return {}
        return await self._log_ends.ends()

    @staticmethod
    def _count(events: Sequence[Event], where: str) -> None:
        for event in events:
            metrics.PUBLISHED.labels(event.topic, where).inc()


def _is_about_session(event: Event) -> bool:
    """Return whether consumers match the event with a run of its session by offsets (docs/decisions/0002)."""
    return isinstance(event, Feedback) and not event.msg_ids and event.level != "task"


def _is_for_all_partitions(event: Event) -> bool:
    """Return whether the event must be sent to all partitions, because it concerns sessions in each of them.

    This holds for feedback about a task, and for the request of a tenant to end all its sessions with feedback.
    """
    commit = isinstance(event, SessionEnd) and event.scope == "tenant"
    return commit or (isinstance(event, Feedback) and event.level == "task")


async def _records(producer: EventProducer, event: Event, ends: Ends) -> list[Outgoing]:
    """Return the records of an event: one, or one for each partition if the event concerns several sessions."""
    if _is_for_all_partitions(event):
        partitions = sorted(await producer.partitions(event.topic))
        return [await producer.encode(event.model_copy(update={"partition": number}), number) for number in partitions]
    if ends and _is_about_session(event):
        return [await producer.encode(event, after=end_offsets_of(ends, event.key))]
    return [await producer.encode(event)]


def _event(item: Spooled) -> Event:
    if item.damage:
        record = Record("spool", -1, -1, None, item.value[:_DAMAGED_BYTES_MAX])
        return dead_letter("gateway", record, "spool_damaged", item.damage)
    record = Record(item.topic, -1, -1, None, item.value[:_DAMAGED_BYTES_MAX])
    try:
        return EVENTS[item.topic].from_stored(item.value)
    except InvalidEvent as error:  # written by a release with another schema
        return dead_letter("gateway", record, error.reason, str(error))
    except Exception as error:  # noqa: BLE001 (the spool must be emptied, whatever it holds)
        return dead_letter("gateway", record, "undecodable", reason_of(error))
