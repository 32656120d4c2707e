"""A consumer without the stream host pauses when it refuses nearly all records, and resumes on request."""

from __future__ import annotations

import asyncio

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import RefusalBounds
from headrace_runtime.stream.pausing import DeadLetterLimiter


def record(offset: int) -> Record:
    return Record("experiences", 0, offset, None, b"{")


async def test_it_pauses_after_so_many_in_a_row_and_loses_none() -> None:
    sent: list[int] = []

    async def send(refused: Record, _error: InvalidEvent) -> None:
        sent.append(refused.offset)

    refusing = DeadLetterLimiter("test", send, RefusalBounds(run_max=3))
    for offset in range(3):
        await refusing(record(offset), InvalidEvent("invalid_event", "{"))
    waiting = asyncio.create_task(refusing(record(3), InvalidEvent("invalid_event", "{")))
    await asyncio.sleep(0)
    assert refusing.paused is not None
    assert "3 records in a row" in refusing.paused
    assert sent == [0, 1, 2]
    refusing.resume()
    await waiting
    assert sent == [0, 1, 2, 3]
    assert refusing.paused is None


async def test_what_is_handled_in_between_counts() -> None:
    async def send(_refused: Record, _error: InvalidEvent) -> None:
        pass

    refusing = DeadLetterLimiter("test", send, RefusalBounds(run_max=1))
    for offset in range(5):
        await refusing(record(offset), InvalidEvent("invalid_event", "{"))
        refusing.handled()
    assert refusing.paused is None
