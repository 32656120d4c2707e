"""Clock of the services. It is passed as a parameter, so that tests and the simulation can replace it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Source of the current UTC time (`now`), of monotonic time in seconds (`monotonic_s`), and of pauses (`sleep`)."""

    def now(self) -> datetime: ...

    def monotonic_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """Clock that returns the time of this machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def epoch_ms(instant: datetime) -> int:
    """Convert a time to milliseconds since 1970, the form in which Headrace's databases store times."""
    return round(instant.timestamp() * 1000)


def from_epoch_ms(value: int) -> datetime:
    """Convert milliseconds since 1970 to a time in UTC."""
    return datetime.fromtimestamp(value / 1000, UTC)
