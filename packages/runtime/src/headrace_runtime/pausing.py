"""Pausing of a consumer that refuses nearly all records, until an operator resumes it."""

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
from headrace_runtime.refusal_limit import REMEDY, TenantLimits
from headrace_runtime.settings import Common, RefusalBounds
from headrace_runtime.wire import UNKNOWN_TENANT, Record, tenant_of
from headrace_schemas import Event

log = get_logger(__name__)


class Pausable(Protocol):
    """Consumer that can pause. `paused` is the reason, or None while it runs."""

    @property
    def paused(self) -> str | None: ...

    def resume(self) -> None: ...


class DeadLetterLimiter:
    """Limits of dead letters for a service without the stream host and without a database.

    The records of a tenant beyond its limits are still dead-lettered while records of other tenants are handled,
    because the letters contain the complete records. If the last record of every tenant was refused, the consumer
    itself may be broken, and it pauses.
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
        """Count a record that was handled."""
        self._limits.note(getattr(event, "tenant", UNKNOWN_TENANT), refused=False)

    async def __call__(self, record: Record, error: InvalidEvent) -> None:
        """Dead-letter a record. Return once the letter is durable, after a pause until `resume` if there were too many.

        Raises:
            Unavailable: the bus does not respond.
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
        """Continue. The limits of refused records begin again at zero."""
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
