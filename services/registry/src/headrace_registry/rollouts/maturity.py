"""When a unit is read: at ages that are the same for both arms, in the order in which units arrived.

A unit is read at an age that was declared beforehand, whatever events it has by then. It is not read when its reward
arrives, because rewards of one arm may arrive sooner, and not when it ends, because bad sessions may be longer. So the
order of readings is the order of arrival, and the arm of the next reading is as open as a coin toss.

A reading is never revised. A reward that is late or revised before the closing age is in the closing reading, which has
an e-process of its own; the probability that either is ever wrong is at most the sum of their errors. To start again
with corrected values would be a new test with each correction, without a bound on all of them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import fmean

from headrace_registry.rollouts.metrics import Metric, SessionRecord


@dataclass(frozen=True, slots=True)
class Unit:
    """A session or a user in one of the two arms."""

    name: str
    candidate: bool
    enrolled: datetime
    """When its first session began; of a user, the first session since the user is in an arm."""

    @property
    def order_key(self) -> tuple[datetime, str]:
        """Sort key of the order of readings. Units of one instant are sorted by name, which is independent of the
        arm."""
        return self.enrolled, self.name


@dataclass(frozen=True, slots=True)
class UnitReading:
    """Metric values of a unit at an age. A metric that abstained is not in `values`."""

    unit: Unit
    values: Mapping[str, float]
    expected: Mapping[str, float] = field(default_factory=dict)
    """Values that were expected before the arm was known, where there were any."""


def due_units(units: Iterable[Unit], now: datetime, age_s: float) -> list[Unit]:
    """Return the units of that age in the order of readings. `now` is how far all topics have been read, not a clock's
    time."""
    age = timedelta(seconds=age_s)
    return sorted((unit for unit in units if unit.enrolled + age <= now), key=lambda unit: unit.order_key)


def read_unit(
    unit: Unit, sessions: Sequence[SessionRecord], metrics: Mapping[str, Metric], age_s: float
) -> UnitReading:
    """Return the unit's reading at that age: of a user, the mean over the sessions that did not abstain."""
    time = unit.enrolled + timedelta(seconds=age_s)
    return measure_unit(unit, [session.as_of(time) for session in sessions], metrics)


def measure_unit(unit: Unit, sessions: Sequence[SessionRecord], metrics: Mapping[str, Metric]) -> UnitReading:
    """Return the metric values of a unit from the sessions as they were known at that age."""
    values = {}
    for name, metric in metrics.items():
        metric_values = [value for value in map(metric.compute, sessions) if value is not None]
        if metric_values:
            values[name] = fmean(metric_values)
    return UnitReading(unit, values)
