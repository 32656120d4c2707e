"""A consumer that refuses nearly every record pauses, reports it, and resumes when an operator says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_runtime import web
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.logs import get_logger
from headrace_runtime.metrics import PAUSED
from headrace_runtime.refusal_limit import REMEDY, RefusalBounds, TenantLimits
from headrace_runtime.settings import Common
from headrace_runtime.wire import UNKNOWN_TENANT, Record, tenant_of
from headrace_schemas import Event

log = get_logger(__name__)


class Pausable(Protocol):
    """`paused` is why it has stopped, None while it goes on."""

    @property
    def paused(self) -> str | None: ...

    def resume(self) -> None: ...


class Refusing:
    """Dead letters of a service without the stream host and without a database, one record at a time.

    A tenant beyond its bounds is dead-lettered further while the records of another one are handled: the letters hold
    the whole records. When nobody's are, the consumer itself may be broken, and it pauses.
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

    def handled(self, event: Event | None = None) -> None:
        """Note that a record was none to refuse."""
        self._limits.note(getattr(event, "tenant", UNKNOWN_TENANT), refused=False)

    async def __call__(self, record: Record, error: InvalidEvent) -> None:
        """Returns once the dead letter is durable, and not before `resume` when there were too many.

        Raises `Unavailable` when the bus is away.
        """
        tenant = tenant_of(record)
        if not self._limits.admits(tenant):
            reason = self._limits.exceed(tenant)
            if reason is not None:
                log.error("tenant_over_bounds", tenant=tenant or None, reason=reason)
            if self._limits.paused is not None:
                await self._pause(record, self._limits.paused)
        await self._send(record, error)
        self._limits.note(tenant, refused=True)

    def resume(self) -> None:
        """Go on; as much may be refused again before the next pause."""
        self._limits.reset()
        self.paused = None
        PAUSED.labels(self._service).set(0)
        self._resumed.set()

    async def _pause(self, record: Record, reason: str) -> None:
        self.paused = reason
        self._resumed.clear()
        PAUSED.labels(self._service).set(1)
        place = f"{record.topic}[{record.partition}]@{record.offset}"
        log.error("consumer_paused", reason=self.paused, next=place, remedy=REMEDY)
        await self._resumed.wait()


def resume_route(consumer: Pausable, common: Common) -> Route:
    """`POST /resume` lets a consumer go on that has paused because it refused too much."""

    async def resume(request: Request) -> Response:
        web.require_internal_key(request, common)
        paused = consumer.paused
        consumer.resume()
        return JSONResponse({"paused_because": paused})

    return Route("/resume", resume, methods=["POST"])
