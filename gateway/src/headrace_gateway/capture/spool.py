"""Spool: a durable, ordered queue on the disk for events that were not yet sent to the bus, bounded in total and per
tenant.

One process at a time owns the spool, and each event has a digest. The space for work in progress is allocated before
that work begins, so that a disk that becomes full refuses only new requests.

An event is sent once all earlier events of its session on other topics are acknowledged: an end must not overtake the
turns that it ends, nor feedback the turns that it is about. Sessions are independent. A batch takes as many round trips
as the session with the most changes of topic.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pydantic_core import from_json

from headrace_gateway import metrics
from headrace_gateway.capture.spool_file import Spooled
from headrace_gateway.capture.spool_log import SpoolBroken, SpoolLog
from headrace_runtime.errors import Unavailable
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import disk
from headrace_schemas import EVENTS, Event, SessionEnd

T = TypeVar("T")
log = get_logger(__name__)
RESERVE_BYTES = 16 * 1024 * 1024
_ALLOCATE_INTERVAL_S = 0.5


class Shares:
    """Number of bytes in the spool by tenant."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def load(self, sizes: Mapping[str, int]) -> None:
        """Add the bytes of events that were in the spool when the process started."""
        self._bytes.update(sizes)

    def add(self, events: Iterable[Spooled]) -> None:
        for event in events:
            self._bytes[tenant_of(event)] += len(event.value)

    def remove(self, events: Iterable[Spooled]) -> None:
        for event in events:
            tenant = tenant_of(event)
            self._bytes[tenant] -= len(event.value)
            if self._bytes[tenant] <= 0:
                del self._bytes[tenant]

    def of(self, tenant: str) -> int:
        return self._bytes[tenant]


def tenant_of(item: Spooled) -> str:
    """Return the tenant of a spooled event, or an empty string for events without a tenant, such as dead letters."""
    try:
        event = from_json(item.value)
    except ValueError:
        return ""
    if not isinstance(event, dict):
        return ""
    model = EVENTS.get(item.topic)
    field = model.model_fields.get("tenant") if model is not None else None
    return str(event.get("tenant", field.default if field is not None else ""))  # JSON of feedback omits default values


class Spool:
    """Spool of one gateway process. It is an async context manager.

    `append` returns after fsync; concurrent appends share one fsync. Only the task that drains the spool calls `oldest`
    and `remove`.
    """

    def __init__(
        self, folder: Path, bytes_max: int, reserve_bytes: int = RESERVE_BYTES, guard: disk.DiskGuard | None = None
    ) -> None:
        """Create the spool. While the bus is unavailable and `guard` reports too little free space, new requests are
        refused."""
        self._folder = folder
        self._bytes_max = bytes_max
        self._log = SpoolLog(folder, reserve_bytes, guard)
        self._thread = ThreadPoolExecutor(1, "spool")
        self._waiting: list[tuple[Sequence[Spooled], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._allocator: asyncio.Task[None] | None = None
        self._coming_events = 0
        self._coming_bytes = 0

    async def __aenter__(self) -> Spool:
        """Open the spool. If the disk is full, wait until it has space.

        Raises:
            SettingError: another process owns this spool.
            SpoolBroken: a file cannot be read.
        """
        await disk.retry_while_full(lambda: self._run(self._log.open))
        self._measure()
        self._want_room()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._allocator is not None:
            self._allocator.cancel()
        while self._writer is not None:
            await asyncio.wait([self._writer])
        await self._run(self._log.close)
        self._thread.shutdown()

    @property
    def events(self) -> int:
        """Number of events in the spool, including those that are being written."""
        return self._log.events + self._coming_events

    @property
    def bytes(self) -> int:
        return self._log.bytes + self._coming_bytes

    @property
    def full(self) -> bool:
        """Whether the spool has reached its limit, so that new requests are refused. Events of requests in progress are
        still stored; the limit on concurrent requests bounds them."""
        return self.bytes >= self._bytes_max

    @property
    def trouble(self) -> str | None:
        """Reason why the disk has too little space for new requests, or None."""
        return self._log.trouble

    async def append(self, events: Sequence[Spooled]) -> None:
        """Append `events`, and return once they are synced to the disk. Raises `Unavailable` if that fails; in this
        case none of them is stored."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((events, written))
        self._coming_events += len(events)
        self._coming_bytes += sum(len(event.value) for event in events)
        self._measure()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        try:
            await asyncio.shield(written)
        except OSError as error:
            if disk.is_full(error):
                raise disk.full_error(self._folder) from error
            raise Unavailable(f"disk: {self._folder}: {error.strerror}") from error

    async def tenants(self) -> Mapping[str, int]:
        """Return the number of bytes of spooled events by tenant."""
        return await self._run(self._tenants)

    async def oldest(self, limit: int) -> list[Spooled]:
        return await self._run(lambda: self._log.oldest(limit))

    async def remove(self, events: Sequence[Spooled]) -> None:
        """Remove events that `oldest` returned, because the bus has acknowledged them."""
        await self._run(lambda: self._log.remove(events))
        self._measure()

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            events = [event for group, _ in batch for event in group]
            try:
                await self._run(lambda events=events: self._log.append(events))  # type: ignore[misc]
            except OSError as error:
                for _, written in batch:
                    written.set_exception(error)
                    written.exception()  # marked as retrieved, because the caller may have been cancelled
            else:
                for _, written in batch:
                    written.set_result(None)
            self._coming_events -= len(events)
            self._coming_bytes -= sum(len(event.value) for event in events)
            self._measure()
        self._writer = None
        self._want_room()

    def _tenants(self) -> Mapping[str, int]:
        sizes: Counter[str] = Counter()
        for event in self._log.waiting():
            sizes[tenant_of(event)] += len(event.value)
        return sizes

    def _want_room(self) -> None:
        if self.trouble is not None and self._allocator is None:
            self._allocator = asyncio.create_task(self._allocate_ahead())

    async def _allocate_ahead(self) -> None:
        log.error("spool_refuses_new_work", error=self.trouble)
        while self.trouble is not None:
            await asyncio.sleep(_ALLOCATE_INTERVAL_S)
            await self._run(self._log.allocate_ahead)
        self._allocator = None
        log.info("spool_takes_new_work")

    def _measure(self) -> None:
        metrics.SPOOL_EVENTS.set(self.events)
        metrics.SPOOL_BYTES.set(self.bytes)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


__all__ = ["RESERVE_BYTES", "Spool", "SpoolBroken", "Spooled"]


def split_into_stages(items: Sequence[T], event_of: Callable[[T], Event]) -> list[list[T]]:
    """Divide events into stages, each of which may be sent once the stage before it is acknowledged. This keeps the
    order of the events of each session across topics.

    Items keep their order within a stage. A tenant's commit waits for all items before it, and all items after it wait
    for it.
    """
    stages: list[list[T]] = []
    last: dict[str, tuple[int, str]] = {}
    """By key: the stage and the topic of its newest event."""
    barrier = 0
    for item in items:
        event = event_of(item)
        if isinstance(event, SessionEnd) and event.scope == "tenant":
            stage, barrier = len(stages), len(stages) + 1
        else:
            before, topic = last.get(event.key, (barrier, event.topic))
            stage = max(barrier, before + (topic != event.topic))
            last[event.key] = stage, event.topic
        if stage == len(stages):
            stages.append([])
        stages[stage].append(item)
    return stages
