"""The clock is a parameter, so that tests and the simulation can replace it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """`now` is civil time, `monotonic_s` measures durations, `sleep` waits on the same clock."""

    def now(self) -> datetime: ...

    def monotonic_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def epoch_ms(instant: datetime) -> int:
    """Milliseconds since 1970, the form in which databases here keep time."""
    return round(instant.timestamp() * 1000)


def from_epoch_ms(value: int) -> datetime:
    return datetime.fromtimestamp(value / 1000, UTC)
