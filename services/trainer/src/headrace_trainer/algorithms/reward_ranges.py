"""Learned ranges of reward sources, and winsorised rewards: a stray value in another unit has bounded influence.

For each source the last `WINDOW` = 128 values are kept, one per run. Of n values, m is their median and S the largest
distance from m after the n // 32 largest distances (at least one) were left out. Where all other values equal m, S is
the median of the distances that are not 0, and at least |m|. A value beyond m ± factor · S is a stray. It counts as the
nearest value of the window within these bounds: it is winsorised (Tukey, "The future of data analysis", Annals of
Mathematical Statistics 33, 1962; bounded influence: Huber & Ronchetti, "Robust Statistics", 2009, chapter 1).

- Breakdown point: n // 32 strays of n values, 4 of 128. S depends on none of them, however large they are.
- Change of unit: from the fifth value in a larger unit on, all values count in full. After 128 runs in a smaller
  unit, the deviation is that of this unit.
- Heavy tails: a value is only winsorised where it exceeds `factor` times the fifth largest distance of the window. With
  a Pareto tail of index 2 that happens to about 3 values in 1,000, and they still count as the largest.

The deviation and the means that the estimators remember are repaired where the window refutes them: after a stray that
came before there were values to compare it with, and after a change to a smaller unit. All of it is plain arithmetic
on numbers of the stream in its order, so that a replay makes the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median_low, pvariance

from pydantic import Field

from headrace_schemas import Experience
from headrace_schemas.values.base import Finite, Model
from headrace_schemas.values.ids import tenant_name
from headrace_schemas.values.text import printable

WINDOW = 128
VALUES_MIN = 8
"""Number of values below which no value counts as a stray."""
SOURCES_MAX = 128
STRAYS_MAX = 8
STRAY_AGE_MAX = 1024
"""Values of a source after which a stray of it is reported no longer."""
_LEFT_OUT = 32
UNNAMED = "reward"
"""Source of a reward without parts."""
TURNS = "turn rewards"
"""Source of the rewards of single turns."""
TOTAL = ""
"""Source of the combined rewards, after their parts were winsorised."""


@dataclass(frozen=True, slots=True)
class RangeLimits:
    """Limits for outliers among rewards: how far a value may lie from the median of its source before it is clipped."""

    factor: float = 0.0
    """Distances from the median, in units of S. 0: all values count in full."""
    spread_min: float = 0.01
    """Lower bound on S."""


NO_LIMITS = RangeLimits()


@dataclass(frozen=True, slots=True)
class Bounds:
    """Interval in which values count in full, with the smallest and the largest value of the window within it."""

    lowest: float
    highest: float
    low: float
    high: float
    spread: float
    """S, the largest usual distance from the median."""

    def winsorise(self, value: float) -> float:
        """Return `value` if it lies within `lowest` and `highest`, otherwise the window's value nearest to it."""
        if value < self.lowest:
            return self.low
        return self.high if value > self.highest else value


class Stray(Model):
    """A reward value outside the bounds of its source (an outlier), which counted as the nearest value within them."""

    source: str
    value: Finite
    low: Finite
    high: Finite
    at: int
    """Index of the value among those of its source."""

    def __str__(self) -> str:
        return (
            f"{printable(self.source)} = {self.value:g}: this reward is far outside the source's usual values "
            f"({self.low:g} to {self.high:g}) and counted as {self.low if self.value < self.low else self.high:g}"
        )


class SourceRange(Model):
    """The last `WINDOW` reward values of one source, before outliers are winsorised."""

    values: tuple[Finite, ...] = ()
    count: int = 0
    """Number of values of the source so far."""
    last_run: str = ""

    def add(self, run: str, value: float) -> SourceRange:
        """Return the window after a run's value was added.

        Branches of one run that report the same value count once.
        """
        if run == self.last_run and self.values and self.values[-1] == value:
            return self
        return SourceRange(values=(*self.values, value)[-WINDOW:], count=self.count + 1, last_run=run)

    def bounds(self, limits: RangeLimits) -> Bounds | None:
        """Return the bounds beyond which a reward of this source counts as an outlier (stray), or None while there are
        too few values.
        """
        return _bounds(self.values, limits)


@lru_cache(maxsize=1024)
def _bounds(values: tuple[float, ...], limits: RangeLimits) -> Bounds | None:
    if len(values) < VALUES_MIN:
        return None
    middle = median_low(values)
    distances = sorted((abs(value - middle) for value in values), reverse=True)
    spread = distances[max(1, len(distances) // _LEFT_OUT)]
    if spread == 0:
        rare = [distance for distance in distances if distance > 0]
        spread = max(median_low(rare) if len(rare) > 1 else 0.0, abs(middle))
        if spread == 0:
            return None  # a constant 0 has no unit, so that any first value is plausible
    spread = max(spread, limits.spread_min)
    reach = limits.factor * spread
    inside = [value for value in values if abs(value - middle) <= reach]
    return Bounds(middle - reach, middle + reach, min(inside), max(inside), spread)


class RewardRanges(Model):
    """Recent reward values of each source, from which the limits for outliers are computed. Immutable; saved with the
    weights.
    """

    sources: dict[str, SourceRange] = Field(default_factory=dict)
    """Ranges by source, least recently updated first."""
    strays: tuple[Stray, ...] = ()
    """The last strays, as far as they are still outside the bounds."""

    def winsorise(self, experience: Experience, limits: RangeLimits) -> Experience:
        """Return the experience with outliers among its rewards clipped to the bounds of their sources (winsorised), or
        unchanged if it has none.
        """
        if not limits.factor or not self.sources:
            return experience
        if not self._strays_of(experience, limits):
            return experience
        parts = tuple(
            part.model_copy(update={"value": self._winsorise(experience, part.source, part.value, limits)})
            for part in experience.parts
        )
        turns = tuple(
            turn.model_copy(update={"value": self._winsorise(experience, TURNS, turn.value, limits)})
            for turn in experience.turn_rewards
        )
        reward = experience.reward
        if parts != experience.parts:
            reward = math.fsum(part.value * part.weight for part in parts)
        elif not parts and reward is not None:
            reward = self._winsorise(experience, UNNAMED, reward, limits)
        return experience.model_copy(update={"parts": parts, "turn_rewards": turns, "reward": reward})

    def record_strays(self, experience: Experience, limits: RangeLimits) -> RewardRanges:
        """Return a copy with the outliers among the rewards of `experience` added to `strays`, which operators see."""
        strays = self._strays_of(experience, limits) if limits.factor else []
        return self.model_copy(update={"strays": _distinct_strays([*self.strays, *strays])}) if strays else self

    def _strays_of(self, experience: Experience, limits: RangeLimits) -> list[Stray]:
        strays = []
        for source, value in _values(experience):
            key = _key(experience, source)
            source_range = self.sources.get(key)
            bounds = None if source_range is None else source_range.bounds(limits)
            if source_range is not None and bounds is not None and bounds.winsorise(value) != value:
                strays.append(Stray(source=key, value=value, low=bounds.low, high=bounds.high, at=source_range.count))
        return strays

    def _winsorise(self, experience: Experience, source: str, value: float, limits: RangeLimits) -> float:
        source_range = self.sources.get(_key(experience, source))
        bounds = None if source_range is None else source_range.bounds(limits)
        return value if bounds is None else bounds.winsorise(value)

    def add_batch(self, batch: Sequence[tuple[str, Experience]], limits: RangeLimits) -> RewardRanges:
        """Return a copy to whose windows the rewards of a batch were added, in the order of its runs.

        Args:
            batch: name of each run, with its experience.
        """
        if not limits.factor:
            return self
        sources = dict(self.sources)
        values: list[tuple[str, str, float]] = []
        for run, experience in batch:
            values += ((run, _key(experience, source), value) for source, value in _values(experience))
        _add(sources, values)
        ranges = RewardRanges(sources=sources)
        totals = [
            (run, TOTAL, bounded.reward)
            for run, bounded in ((run, ranges.winsorise(experience, limits)) for run, experience in batch)
            if bounded.reward is not None
        ]
        _add(sources, totals)
        for name in list(sources)[: max(0, len(sources) - SOURCES_MAX)]:
            del sources[name]
        ranges = RewardRanges(sources=sources)
        strays = [*self.strays, *(stray for _, experience in batch for stray in ranges._strays_of(experience, limits))]
        return RewardRanges(
            sources=sources, strays=_distinct_strays(stray for stray in strays if ranges._is_current(stray, limits))
        )

    def _is_current(self, stray: Stray, limits: RangeLimits) -> bool:
        """Return whether an outlier (stray) is one of the recent rewards and still outside the bounds of its source."""
        source_range = self.sources.get(stray.source)
        if source_range is None or source_range.count - stray.at >= STRAY_AGE_MAX:
            return False
        bounds = source_range.bounds(limits)
        return bounds is None or bounds.winsorise(stray.value) != stray.value

    def combined_bounds(self, limits: RangeLimits) -> Bounds | None:
        """Return the range in which combined rewards are expected, derived from the recent ones. None if there is no
        range, or if some recent rewards lie outside of it.

        In that case rewards of several scales are mixed, and a value outside of the range does not indicate an error.
        """
        if not limits.factor or TOTAL not in self.sources:
            return None
        values = self.sources[TOTAL].values
        bounds = _bounds(values, limits)
        return bounds if bounds is not None and (bounds.low, bounds.high) == (min(values), max(values)) else None

    @property
    def variance(self) -> float:
        """Return the variance of the combined rewards in the window."""
        return pvariance(self.sources[TOTAL].values)


def _distinct_strays(strays: Iterable[Stray]) -> tuple[Stray, ...]:
    """Return the newest outliers, at most `STRAYS_MAX`, without repetitions of the same source and value."""
    return tuple({(stray.source, stray.value): stray for stray in strays}.values())[-STRAYS_MAX:]


def _add(sources: dict[str, SourceRange], values: Iterable[tuple[str, str, float]]) -> None:
    for run, source, value in values:
        sources[source] = sources.pop(source, SourceRange()).add(run, value)


def _key(experience: Experience, source: str) -> str:
    """Return the key under which a source's recent values are stored. It contains the tenant, because tenants may use
    different scales.
    """
    plain = experience.tenant == "default" and "/" not in source
    return source if plain else tenant_name(experience.tenant, source)


def _values(experience: Experience) -> Iterable[tuple[str, float]]:
    if experience.parts:
        yield from ((part.source, part.value) for part in experience.parts)
    elif experience.reward is not None:
        yield UNNAMED, experience.reward
    turns = [turn.value for turn in experience.turn_rewards]
    if turns:  # all turns of a run are no more than two of the window: one run cannot move the bounds
        yield from ((TURNS, value) for value in dict.fromkeys((min(turns), max(turns))))
