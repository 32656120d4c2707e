"""Follows the decisions of the registry while the demo runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from headrace.errors import Unreachable
from headrace.topics import Progress, Range, Topics, connected
from headrace_schemas import ModelEvent

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Scored:
    """A version whose score is measured, on tasks that chose nothing."""

    version: str
    score: float
    time: datetime


@dataclass(slots=True)
class Watch:
    """`run` until cancelled; the rest may be read at any time."""

    bus: str
    model: str
    """The one that learns; what is decided about others is passed over."""
    tell: Callable[[ModelEvent], None] = lambda event: None
    scores: dict[str, Scored] = field(default_factory=dict)
    """Held-out success by version, on the audit tasks, in the order of evaluation. Versions that serve have one."""
    rejected: dict[str, datetime] = field(default_factory=dict)
    """Versions that the gate refused, and when."""
    champions: list[str] = field(default_factory=list)
    """Versions that took over, in order; the first one began the demo."""
    registered: dict[str, datetime] = field(default_factory=dict)
    """When the registry first had each version."""
    takeover_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the registration of each version that took over to its promotion, both by the registry's clock."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: set[str] = field(default_factory=set)
    _offset: int = 0

    @property
    def swaps(self) -> int:
        return max(0, len(self.champions) - 1)

    @property
    def gain(self) -> float:
        """How much better the last champion that is measured is than the first; 0 before there are two scores."""
        scores = [self.scores[version].score for version in self.champions if version in self.scores]
        return scores[-1] - scores[0] if scores else 0.0

    async def run(self) -> None:
        """A bus that is away is waited for: it is started again, and what it had is still there."""
        while True:
            with contextlib.suppress(Unreachable):
                async with connected(self.bus) as topics:
                    await self._follow(topics)
            await asyncio.sleep(_POLL_S)

    async def _follow(self, topics: Topics) -> None:
        while True:
            progress = Progress()
            async for entry in topics.read(Range("model-events", from_offset=self._offset), progress):
                self._offset = entry.offset + 1
                event = entry.event
                if isinstance(event, ModelEvent) and event.model == self.model and event.event_id not in self._seen:
                    self._seen.add(event.event_id)
                    self._take(event)
            await asyncio.sleep(_POLL_S)

    def _take(self, event: ModelEvent) -> None:
        if "score" in event.statistics:
            self.scores.setdefault(event.version, Scored(event.version, event.statistics["score"], event.time))
        if event.decision == "registered":
            self.registered.setdefault(event.version, event.time)
        elif event.decision == "promoted":
            self.champions.append(event.version)
            if event.version in self.registered:
                waited = event.time - self.registered[event.version]
                self.takeover_s.setdefault(event.version, waited.total_seconds())
        elif event.decision == "rejected":
            self.rejected[event.version] = event.time
        elif event.decision == "rolled_back" and event.previous is not None:
            self.champions.append(event.previous)
        self.tell(event)
        self.changed.set()
