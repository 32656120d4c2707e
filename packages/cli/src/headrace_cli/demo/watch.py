"""Decisions of the registry, followed while the demo runs."""

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
class VersionAudit:
    """Audit score of a version, measured on tasks that selected no version."""

    version: str
    score: float
    time: datetime


@dataclass(slots=True)
class Watch:
    """Follower of the registry's events. `run` it until cancelled; the fields may be read at any time."""

    bus: str
    model: str
    """The trained model; events of other models are ignored."""
    on_event: Callable[[ModelEvent], None] = lambda event: None
    scores: dict[str, VersionAudit] = field(default_factory=dict)
    """Audit score by version, in the order of evaluation; only versions that served have one."""
    rejected: dict[str, datetime] = field(default_factory=dict)
    """Versions that the gate refused, with the time."""
    champions: list[str] = field(default_factory=list)
    """Versions that took over, in order; the first one is the base."""
    registered: dict[str, datetime] = field(default_factory=dict)
    """Time at which the registry registered each version."""
    takeover_s: dict[str, float] = field(default_factory=dict)
    """Seconds between registration and promotion of each version that took over, by the registry's clock."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: set[str] = field(default_factory=set)
    _offset: int = 0

    @property
    def swaps(self) -> int:
        return max(0, len(self.champions) - 1)

    @property
    def gain(self) -> float:
        """Score of the last measured champion minus that of the first; 0 with fewer than two scores."""
        scores = [self.scores[version].score for version in self.champions if version in self.scores]
        return scores[-1] - scores[0] if scores else 0.0

    async def run(self) -> None:
        """Follow the events. If the bus does not answer, try again until it does."""
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
                    self._add(event)
            await asyncio.sleep(_POLL_S)

    def _add(self, event: ModelEvent) -> None:
        if "score" in event.statistics:
            self.scores.setdefault(event.version, VersionAudit(event.version, event.statistics["score"], event.time))
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
        self.on_event(event)
        self.changed.set()
