"""Types of the work that a stream service does: handlers of records, steps, and the bounds of both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import Clock
from headrace_runtime.errors import HeadraceError
from headrace_runtime.refusal_limit import RefusalBounds
from headrace_runtime.wire import Received
from headrace_schemas import Event

_REST_S = 0.005


@dataclass(frozen=True, slots=True)
class Handling:
    """What a handler may use: the open transaction, the time, the record it handles, how far the logs reach.

    `ends` maps a topic to the end offset of each partition, read just before this batch; only for topics that the
    service asked for.
    """

    tx: AsyncConnection
    now: datetime
    received: Received
    ends: Mapping[str, Mapping[int, int]]


Handler = Callable[[Any, Handling], Awaitable[Sequence[Event]]]
"""`async (event, handling) -> events`: changes tables only through `handling.tx`, returns what is to be published.

It must be deterministic in the event and the tables. It may raise `InvalidEvent` (dead-letter this one) or
`Unavailable` (try the batch again); anything else is retried and then dead-lettered as `handler_error`.
"""

Step = Callable[[AsyncConnection, datetime], Awaitable[Sequence[Event]]]
"""Work without an event of its own. It must go through its items with `headrace_runtime.isolation.each`.

When it raises anything but `Unavailable`, it runs again with its items isolated, so that the one at fault fails alone.
What still raises then is no item's fault: `StepFailed`.
"""


class Unfinished(list[Event]):
    """What a step returns when it has done as much as one transaction should: there is more of the same to do."""


Ends = Callable[[str], Awaitable[Mapping[int, int]]]


@dataclass(frozen=True, slots=True)
class ProcessorLimits:
    """Bounds of the policy; each is a setting of the service."""

    retry_s: float = 60.0
    """How long a batch is tried again while something is away, before the process gives up and is restarted."""
    attempts: int = 3
    """How often a record whose handler fails is tried before it is dead-lettered."""
    seen_for: timedelta = timedelta(days=8)
    """How long event ids are remembered; longer than the retention of what they dedupe."""
    refusals: RefusalBounds = field(default_factory=RefusalBounds)
    """How much may be refused before the consumer pauses."""


DEFAULT_LIMITS = ProcessorLimits()


class StepFailed(HeadraceError):
    """A step raised although its items were isolated. Nothing of it was done; a timer runs it again."""


async def in_turns(clock: Clock, work: Callable[[], Awaitable[bool]]) -> None:
    """Do `work` until it says that nothing is left, and rest as long as it took each time: the stream comes first."""
    while True:
        began = clock.monotonic_s()
        if not await work():
            return
        await clock.sleep(max(_REST_S, clock.monotonic_s() - began))
