"""Types of the work of a stream service: handlers of records, steps (work that is not caused by a record), and their
limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import Clock
from headrace_runtime.errors import HeadraceError
from headrace_runtime.kafka.wire import Received
from headrace_runtime.settings.sections import RefusalBounds
from headrace_schemas import Event

_REST_S = 0.005


@dataclass(frozen=True, slots=True)
class Handling:
    """Context of one call of a handler: transaction, time, received event, and end offsets of topics."""

    tx: AsyncConnection
    """Open transaction, in which the handler must make all its changes."""
    now: datetime
    received: Received
    """Event to handle, with its envelope and its record."""
    ends: Mapping[str, Mapping[int, int]]
    """End offsets by topic and partition, read just before this batch, for the topics in `Processor.ends_of`."""


Handler = Callable[[Any, Handling], Awaitable[Sequence[Event]]]
"""Handler `async (event, handling) -> events`. It returns the events to publish.

A handler must change tables only through `handling.tx`, and be deterministic in the event and the tables. It may raise
`InvalidEvent` (the record is dead-lettered) or `Unavailable` (the batch is retried). For other exceptions the record is
retried and then dead-lettered as `handler_error`.
"""

Step = Callable[[AsyncConnection, datetime], Awaitable[Sequence[Event]]]
"""Work that is not caused by a single event. It must process its items with `headrace_runtime.storage.isolation.each`.

If it raises an exception other than `Unavailable`, it is repeated with isolated items, so that only a failing item
fails. If it raises again, no item is the cause, and `StepFailed` is raised.
"""


class Unfinished(list[Event]):
    """Events of a step that has done enough work for one transaction, and must run again for the rest."""


Ends = Callable[[str], Awaitable[Mapping[int, int]]]
"""Function that returns the end offset of each partition of a topic."""


@dataclass(frozen=True, slots=True)
class ProcessorLimits:
    """Limits of a processor, which are settings of the service."""

    retry_s: float = 60.0
    """Seconds for which a batch is retried while a dependency is unavailable, before the process exits."""
    attempts: int = 3
    """Number of attempts to handle a record, after which it is dead-lettered."""
    seen_for: timedelta = timedelta(days=8)
    """Age at which ids of handled events are deleted. It must exceed the retention of the topics."""
    refusals: RefusalBounds = field(default_factory=RefusalBounds)
    """Limits on the refused records of a tenant."""


DEFAULT_LIMITS = ProcessorLimits()


class StepFailed(HeadraceError):
    """Raised if a step fails even with isolated items. Its transaction was rolled back, and a timer runs it again."""


async def run_until_finished(clock: Clock, work: Callable[[], Awaitable[bool]]) -> None:
    """Run `work` until it returns False. After each run, pause as long as the run took, because records have
    precedence."""
    while True:
        began = clock.monotonic_s()
        if not await work():
            return
        await clock.sleep(max(_REST_S, clock.monotonic_s() - began))
