"""Measures of versions besides their score: their definitions in a recipe, their values, and checks of limits."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.errors import UsageError
from headrace_statistics import intervals

ROUNDING = 1e-9
"""Tolerance for rounding errors in sums of shares."""


class DemoMeasure(BaseModel):
    """Definition of a measure, the mean of one field in the lines that the recipe's `measure` prints, with its
    limits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: Annotated[str, Field(min_length=1)]
    percent: bool = False
    """Whether the value is printed in percent; limits are in 0..1 in any case."""
    before_min: float | None = None
    before_max: float | None = None
    """Limits of the first version: a version that begins at the goal has nothing to learn."""
    after_min: float | None = None
    after_max: float | None = None
    gain_min: float | None = None
    """Minimum difference between the last version and the first one."""
    at_min: dict[int, float] = Field(default_factory=dict)
    """Minimum at a row, such as `{ 500 = 0.67 }`."""
    rises: bool = False
    """Whether each row must be above the row before it."""

    def text(self, value: float) -> str:
        return f"{value:.1%}" if self.percent else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """Means of one measure for the first and the last version over the same plays."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class MeasuredPlays:
    """Lines that the recipe's program `measure` printed for one version, with one line for each play.

    A play is one attempt of the agent at one task. There is at least one line.
    """

    lines: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, output: bytes) -> MeasuredPlays:
        return cls(tuple(json.loads(line) for line in output.splitlines() if line.strip()))

    def mean(self, name: str) -> float:
        """Return the mean of a field over all plays.

        Raises:
            UsageError: a play has no number in this field.
        """
        return statistics.fmean(self.numbers(name))

    def numbers(self, name: str) -> list[float]:
        """Return the values of a numeric field, one for each play.

        Raises:
            UsageError: a play has no number in this field.
        """
        values = [line.get(name) for line in self.lines]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) < len(values):
            raise UsageError(f"{len(values) - len(numbers)} of {len(values)} measured plays have no number {name!r}")
        return numbers

    def texts_by_task(self, name: str) -> dict[str, str]:
        """Return the text in field `name` of each play, by task."""
        return {str(line["task"]): str(line[name]) for line in self.lines if name in line and "task" in line}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check of a demo: the limit, the measured value, and whether the value is within the limit.

    The fields have the names of `reports/demo.json`.
    """

    name: str
    wanted: str
    found: str
    holds: bool


def check_measures(
    measures: Mapping[str, DemoMeasure], seeds: Sequence[Mapping[str, BeforeAfter]]
) -> list[CheckResult]:
    """Compare the medians over `seeds` with the limits of all measures."""
    return [line for name, measure in measures.items() for line in _check_measure(name, measure, medians(name, seeds))]


def medians(name: str, seeds: Sequence[Mapping[str, BeforeAfter]]) -> tuple[float, float, float]:
    """Return the medians over the seeds of a measure before the demo, after it, and of its gain per seed."""
    values = [seed[name] for seed in seeds]
    columns = (
        [value.before for value in values],
        [value.after for value in values],
        [value.after - value.before for value in values],
    )
    before, after, gain = map(statistics.median, columns)
    return before, after, gain


def _check_measure(name: str, measure: DemoMeasure, measured: tuple[float, float, float]) -> Iterable[CheckResult]:
    before, after, gain = measured
    limits = (
        ("before", before, measure.before_min, measure.before_max),
        ("after", after, measure.after_min, measure.after_max),
        ("gain", gain, measure.gain_min, None),
    )
    for column, value, minimum, maximum in limits:
        text = measure.text(value)
        if minimum is not None:
            yield CheckResult(f"{name}: {column}", f">= {measure.text(minimum)}", text, value >= minimum - ROUNDING)
        if maximum is not None:
            yield CheckResult(f"{name}: {column}", f"<= {measure.text(maximum)}", text, value <= maximum + ROUNDING)


class RowsRecipe(BaseModel):
    """Points of a demo at which versions are measured, in a unit that the agent counts.

    The agent's command runs from each point to the next one, which it gets as `{row_before}` and `{row}`. It ends at
    the point, and with it the traffic; the version that serves then is measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: Annotated[str, Field(min_length=1)]
    """Unit of the rows, such as rounds or games."""
    at: Annotated[tuple[int, ...], Field(min_length=2)]
    """Ascending positions; the first is 0, the first version."""

    @model_validator(mode="after")
    def _ascend_from_0(self) -> Self:
        if self.at[0] != 0 or any(row >= next_row for row, next_row in itertools.pairwise(self.at)):
            raise ValueError(f"at = {list(self.at)}: must ascend from 0, for example [0, 5, 10]")
        return self

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Pairs of consecutive points. Between the two the agent works and its traffic is trained."""
        return tuple(itertools.pairwise(self.at))


@dataclass(frozen=True, slots=True)
class Row:
    """Means of the measures of the version that served at one point of a demo."""

    at: int
    version: str
    measures: Mapping[str, float]
    margins: Mapping[str, float] = field(default_factory=dict)
    """Half widths of the 95 % intervals over plays."""
    plays: int = 0

    @classmethod
    def of(cls, at: int, version: str, measures: Mapping[str, DemoMeasure], plays: MeasuredPlays) -> Row:
        """Compute the means of all measures over the plays of a version.

        Raises:
            UsageError: a play has no number of a measure.
        """
        numbers_by_measure = {name: plays.numbers(measure.field) for name, measure in measures.items()}
        means = {name: statistics.fmean(numbers) for name, numbers in numbers_by_measure.items()}
        margins = {name: _margin(numbers) for name, numbers in numbers_by_measure.items()}
        return cls(at, version, means, margins, len(plays.lines))


def median_row(name: str, seeds: Sequence[Sequence[Row]]) -> list[float]:
    """Return, for each point of a demo, the median of the measure `name` over the runs with different seeds."""
    return [statistics.median(row.measures[name] for row in same) for same in zip(*seeds, strict=True)]


def check_rows(measures: Mapping[str, DemoMeasure], seeds: Sequence[Sequence[Row]]) -> Iterable[CheckResult]:
    """Compare the medians over `seeds` with the limits of single points. A point without a measurement fails."""
    at = [row.at for row in seeds[0]]
    for name, measure in measures.items():
        values = dict(zip(at, median_row(name, seeds), strict=True))
        for position, minimum in measure.at_min.items():
            value = values.get(position, math.nan)
            text = measure.text(value) if position in values else "not measured"
            yield CheckResult(
                f"{name}: at {position}", f">= {measure.text(minimum)}", text, value >= minimum - ROUNDING
            )
        if measure.rises:
            increases = len(values) > 1 and all(
                value < next_value for value, next_value in itertools.pairwise(values.values())
            )
            text = ", ".join(map(measure.text, values.values()))
            yield CheckResult(f"{name}: rises", "each row above the row before", text, increases)


def _margin(numbers: Sequence[float]) -> float:
    return intervals.mean_margin(numbers, 0.975) if len(numbers) > 1 else 0.0
