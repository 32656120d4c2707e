"""When a unit counts: at ages that are the same for both arms, in the order in which units came.

A unit is read at an age that was declared, whatever it has by then: not when its reward comes, for rewards of one
arm may come sooner, and not when it ends, for bad sessions may be longer. So the order of readings is the order of
arrival, and which arm the next reading belongs to is as open as a coin that has not been thrown.

A reading is never taken back. A reward that is late or revised before the closing age is in the closing reading, which
has an e-process of its own; P(either is ever convinced wrongly) is at most the sum of their errors. Beginning anew with
corrected values instead would be a new test with each correction, and nobody could say what all of them together do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import fmean

from headrace_registry.rollouts.metrics import Metric
from headrace_registry.rollouts.records import SessionRecord


@dataclass(frozen=True, slots=True)
class Unit:
    """A session or a user in one of the two arms."""

    name: str
    candidate: bool
    enrolled: datetime
    """When its first session began, or for a user the first one since it is in an arm."""

    @property
    def place(self) -> tuple[datetime, str]:
        """In the order of readings. Units of one instant go by name, which knows nothing of arms."""
        return self.enrolled, self.name


@dataclass(frozen=True, slots=True)
class UnitReading:
    """What a unit was like at an age. A metric that abstained is not in `values`."""

    unit: Unit
    values: Mapping[str, float]
    expected: Mapping[str, float] = field(default_factory=dict)
    """What was expected of it before its arm was known, where anything was."""


def due(units: Iterable[Unit], now: datetime, age_s: float) -> list[Unit]:
    """Those of that age, in the order of readings. `now` is how far all topics have been read, not a clock's time."""
    age = timedelta(seconds=age_s)
    return sorted((unit for unit in units if unit.enrolled + age <= now), key=lambda unit: unit.place)


def read(unit: Unit, sessions: Sequence[SessionRecord], metrics: Mapping[str, Metric], age_s: float) -> UnitReading:
    """The unit as it was at that age: of a user the mean over the sessions that did not abstain."""
    moment = unit.enrolled + timedelta(seconds=age_s)
    return measure(unit, [session.as_of(moment) for session in sessions], metrics)


def measure(unit: Unit, known: Sequence[SessionRecord], metrics: Mapping[str, Metric]) -> UnitReading:
    """What the metrics say of the unit; `known` is all that had been read of it at that age."""
    values = {}
    for name, metric in metrics.items():
        found = [value for value in map(metric.compute, known) if value is not None]
        if found:
            values[name] = fmean(found)
    return UnitReading(unit, values)
