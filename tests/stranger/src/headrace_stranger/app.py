"""The service's application: it reads the topic `turns` and answers `GET /last`."""

from __future__ import annotations

import asyncio
from collections import deque

from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_runtime.clock import SystemClock
from headrace_runtime.http import web
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.wire import BatchDecoder
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Turn
from headrace_stranger.service import EchoSettings

HEARD = Counter("headrace_echo_heard_total", "Turns that were heard")


async def run(common: Common, settings: EchoSettings) -> None:
    """Run the service until cancelled."""
    await topics.ensure(common.bus)
    recent: deque[str] = deque(maxlen=settings.kept_max)
    reading = asyncio.Event()

    async def last(_request: Request) -> Response:
        return JSONResponse({"gateway_url": settings.gateway_url, "last": list(recent)})

    application = web.app({"bus": reading.is_set}, [Route("/last", last)], common)
    async with web.serve(application, settings):
        await _read(common, recent, reading)


async def _read(common: Common, recent: deque[str], reading: asyncio.Event) -> None:
    blobs, decoder = BlobStore.open(common), BatchDecoder(SystemClock())
    reader = consumer(common.bus, "echo")
    await reader.start()
    try:
        await reader.seek_to_beginning(*await assign_all(reader, Turn.topic))
        reading.set()
        async for message in reader:
            event = (await decoder.decode(record_of(message), blobs)).event
            if isinstance(event, Turn):
                recent.extend(choice.message.text for choice in event.choices)
                HEARD.inc()
    finally:
        await reader.stop()
