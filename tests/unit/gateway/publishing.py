"""Feedback that is numbered, and a publisher at work, for the tests of its course."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace_gateway.publisher import Publisher
from headrace_schemas import Feedback
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.support.gateway import ListBus

KEY = ids.session_key("default", "run")


def feedback(number: int) -> Feedback:
    return Feedback(time=utcnow(), feedback_id=str(number), session_key=KEY, value=float(number))


def numbers(bus: ListBus) -> list[int]:
    return [int(event.feedback_id) for event in bus.events(Feedback)]


@contextlib.asynccontextmanager
async def running(publisher: Publisher) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
