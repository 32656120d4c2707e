"""Limits on dead letters: for each tenant, and for a consumer that refuses the records of all tenants.

If a tenant exceeds its limit, its further refused records are held in the database, without effects on other tenants.
If the latest record of every tenant was refused, the consumer itself may be broken (a bad deployment). Then it pauses
until an operator resumes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.http import web
from headrace_runtime.kafka.wire import UNKNOWN_TENANT, Record, tenant_of
from headrace_runtime.metrics import PAUSED
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common, RefusalBounds
from headrace_schemas import Event

REMEDY = "fix the cause and restart this service, or POST /resume to continue without a fix"
_TENANTS_MAX = 1_000


class RefusalLimit:
    """Counters of the refused and handled records of one tenant."""

    def __init__(self, bounds: RefusalBounds) -> None:
        self._bounds = bounds
        self._recent: deque[bool] = deque(maxlen=bounds.window)
        self._run = 0

    def note(self, refused: Sequence[bool]) -> None:
        """Count the outcomes of records in order: True for a refused record, False for a handled one."""
        for is_refused in refused:
            self._run = self._run + 1 if is_refused else 0
            self._recent.append(is_refused)

    def admits(self, refused: Sequence[bool]) -> int:
        """Return how many of the next records may be counted before the limit is exceeded. `refused` has True for those
        that are refused."""
        preview = RefusalLimit(self._bounds)
        preview._recent.extend(self._recent)
        preview._run = self._run
        for count, is_refused in enumerate(refused):
            preview.note([is_refused])
            if is_refused and preview.reason is not None:
                return count
        return len(refused)

    @property
    def works(self) -> bool:
        """Whether the latest record of the tenant was handled."""
        return bool(self._recent) and self._run == 0

    @property
    def reason(self) -> str | None:
        """Message about the limit that is exceeded, or None while further records may be refused."""
        bounds, window = self._bounds, len(self._recent)
        if bounds.run_max and self._run > bounds.run_max:
            return f"{bounds.run_max} records in a row were refused (dead_letters.run_max)"
        if window == bounds.window and sum(self._recent) > bounds.share_max * window:
            return f"more than {bounds.share_max:.0%} of {window} records were refused"
        return None

    def reset(self) -> None:
        """Set the counters to zero."""
        self._recent.clear()
        self._run = 0


class TenantLimits:
    """Counters of refused and handled records by tenant, for the tenants with the most recent records. Other tenants
    begin again at zero."""

    def __init__(self, bounds: RefusalBounds) -> None:
        self._bounds = bounds
        self._limits: OrderedDict[str, RefusalLimit] = OrderedDict()
        self._over: dict[str, str] = {}

    def note(self, tenant: str, *, refused: bool) -> None:
        """Count the outcome of one record of a tenant. Call it for a refused record after its dead letter is
        durable."""
        limit = self._limit(tenant)
        limit.note([refused])
        if not refused:
            self._over.pop(tenant, None)

    def admits(self, tenant: str) -> bool:
        """Return whether one more record of the tenant may be dead-lettered."""
        return bool(self._limit(tenant).admits([True]))

    def admit_all(self, tenants: Iterable[str]) -> bool:
        """Return whether records of `tenants`, one for each element, may all be dead-lettered."""
        counts = Counter(tenants)
        return all(self._limit(tenant).admits([True] * count) == count for tenant, count in counts.items())

    def note_held(self, tenant: str) -> str | None:
        """Record that a refused record of the tenant is held. Return the exceeded limit if it is the first one, then
        None."""
        if tenant in self._over:
            return None
        limit = self._limit(tenant)
        limit.note([True])  # so that `reason` is set
        self._over[tenant] = limit.reason or "too many records were refused"
        return self._over[tenant]

    @property
    def paused(self) -> str | None:
        """Reason why the consumer itself may be broken, or None: a tenant exceeds its limit, and the latest record of
        every tenant was refused."""
        if not self._over or any(limit.works for limit in self._limits.values()):
            return None
        return next(iter(self._over.values()))

    def reset(self) -> None:
        """Set the counters of all tenants to zero."""
        self._limits.clear()
        self._over.clear()

    def _limit(self, tenant: str) -> RefusalLimit:
        limit = self._limits.setdefault(tenant, RefusalLimit(self._bounds))
        self._limits.move_to_end(tenant)
        while len(self._limits) > _TENANTS_MAX:
            forgotten, _ = self._limits.popitem(last=False)
            self._over.pop(forgotten, None)
        return limit


log = get_logger(__name__)


class Pausable(Protocol):
    """Consumer that can pause. `paused` is the reason of a pause, or None while the consumer runs."""

    @property
    def paused(self) -> str | None: ...

    def resume(self) -> None: ...


class DeadLetterLimiter:
    """Limits on dead letters for a service that uses neither Faust nor a database.

    If a tenant exceeds its limit, its records are still dead-lettered while records of other tenants are handled,
    because the dead letters contain the complete records. If the latest record of every tenant was refused, the
    consumer itself may be broken, and it pauses.
    """

    def __init__(
        self, service: str, send: Callable[[Record, InvalidEvent], Awaitable[None]], bounds: RefusalBounds
    ) -> None:
        self._service = service
        self._send = send
        self._limits = TenantLimits(bounds)
        self._resumed = asyncio.Event()
        self.paused: str | None = None
        PAUSED.labels(service).set(0)

    def note_handled(self, event: Event | None = None) -> None:
        """Count a record that was handled, for the tenant of its event."""
        self._limits.note(getattr(event, "tenant", UNKNOWN_TENANT), refused=False)

    async def __call__(self, record: Record, error: InvalidEvent) -> None:
        """Send the dead letter of a refused record, and return once it is durable. If too many records were refused,
        first wait until an operator calls `resume`.

        Raises:
            Unavailable: the bus does not respond.
        """
        tenant = tenant_of(record)
        if not self._limits.admits(tenant):
            reason = self._limits.note_held(tenant)
            if reason is not None:
                log.error("tenant_over_bounds", tenant=tenant or None, reason=reason)
            if self._limits.paused is not None:
                await self._pause(record, self._limits.paused)
        await self._send(record, error)
        self._limits.note(tenant, refused=True)

    def resume(self) -> None:
        """End the pause, and set the counters of refused records to zero."""
        self._limits.reset()
        self.paused = None
        PAUSED.labels(self._service).set(0)
        self._resumed.set()

    async def _pause(self, record: Record, reason: str) -> None:
        self.paused = reason
        self._resumed.clear()
        PAUSED.labels(self._service).set(1)
        position = f"{record.topic}[{record.partition}]@{record.offset}"
        log.error("consumer_paused", reason=self.paused, next=position, remedy=REMEDY)
        await self._resumed.wait()


def resume_route(consumer: Pausable, common: Common) -> Route:
    """Return the route `POST /resume`, which resumes a paused consumer."""

    async def resume(request: Request) -> Response:
        web.require_internal_key(request, common)
        paused = consumer.paused
        consumer.resume()
        return JSONResponse({"paused_because": paused})

    return Route("/resume", resume, methods=["POST"])
