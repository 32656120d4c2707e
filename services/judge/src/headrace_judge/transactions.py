"""Small transactions beside the stream, with the stream's retries when the database is unavailable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event

T = TypeVar("T")


async def transact(processor: Processor, work: Callable[[AsyncConnection, datetime], Awaitable[T]]) -> T:
    """Run `work` in a transaction without events, and return its result after the commit. It may run more than once."""
    results: list[T] = []

    async def step(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        results[:] = [await work(tx, now)]
        return ()

    await processor.step(step)
    return results[0]
