"""Events of the bus: each record is read once, and records that are no events are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from headrace_runtime.errors import InvalidEvent
from headrace_schemas import Event
from tests.simulation.bus import Bus

E = TypeVar("E", bound=Event)


class Log:
    """View of an observer that reads every topic from its beginning."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._read: dict[tuple[str, int], list[Event | None]] = {}

    def raw(self, kind: type[E], partition: int) -> list[E | None]:
        """One partition by offset, None where a record is no event."""
        decoded: list[E | None] = self._read.setdefault((kind.topic, partition), [])  # type: ignore[assignment]
        new = self._bus.logs[kind.topic][partition][len(decoded) :]
        decoded.extend(_event(kind, record.value) for record in new)
        return decoded

    def partitions(self, kind: type[E]) -> list[list[E]]:
        """Every event of a topic, repetitions included, by partition and in order."""
        numbers = range(len(self._bus.logs[kind.topic]))
        return [[event for event in self.raw(kind, number) if event is not None] for number in numbers]

    def all(self, kind: type[E]) -> Sequence[E]:
        """Each event once, in order within its partition."""
        events = (event for partition in self.partitions(kind) for event in partition)
        return list({event.event_id: event for event in events}.values())


def _event(kind: type[E], value: bytes | None) -> E | None:
    try:
        return kind.from_json(value or b"")
    except InvalidEvent:
        return None
