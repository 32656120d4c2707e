"""The clock of the services. It is a parameter, so that tests and the simulation can replace it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Clock with civil time (`now`) and with monotonic time (`monotonic_s`, `sleep`)."""

    def now(self) -> datetime: ...

    def monotonic_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """Clock of the machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def epoch_ms(instant: datetime) -> int:
    """Return the milliseconds since 1970, the format of times in Headrace's databases."""
    return round(instant.timestamp() * 1000)


def from_epoch_ms(value: int) -> datetime:
    """Return the time of a number of milliseconds since 1970."""
    return datetime.fromtimestamp(value / 1000, UTC)
