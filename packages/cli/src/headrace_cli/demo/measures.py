"""Measures of versions besides their score, and promises about them: `[measures.NAME]` of a recipe."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import UsageError

ROUNDING = 1e-9
"""Tolerance for rounding errors in sums of shares."""


class DemoMeasure(BaseModel):
    """Mean of one field of the lines that the recipe's `measure` prints, with its limits."""

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
    """Means of the first and the last version over the same plays."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class MeasuredPlays:
    """Lines that `measure` printed for one version, one for each play; never empty."""

    lines: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, output: bytes) -> MeasuredPlays:
        return cls(tuple(json.loads(line) for line in output.splitlines() if line.strip()))

    def mean(self, name: str) -> float:
        """Return the mean of a field.

        Raises:
            UsageError: a play has no number in this field.
        """
        return statistics.fmean(self.numbers(name))

    def numbers(self, name: str) -> list[float]:
        """Return the values of a field, one for each play.

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
class PromisedLine:
    """A promise about a measure of one seed or the median of several seeds, and whether it holds."""

    name: str
    wanted: str
    found: str
    holds: bool


def lines(measures: Mapping[str, DemoMeasure], seeds: Sequence[Mapping[str, BeforeAfter]]) -> list[PromisedLine]:
    """Return the promises of all measures, checked with the medians over `seeds`."""
    return [line for name, measure in measures.items() for line in _lines(name, measure, medians(name, seeds))]


def medians(name: str, seeds: Sequence[Mapping[str, BeforeAfter]]) -> tuple[float, float, float]:
    """Return the medians of before, after and gain over the seeds; the gain is computed for each seed."""
    values = [seed[name] for seed in seeds]
    columns = (
        [value.before for value in values],
        [value.after for value in values],
        [value.after - value.before for value in values],
    )
    before, after, gain = map(statistics.median, columns)
    return before, after, gain


def _lines(name: str, measure: DemoMeasure, measured: tuple[float, float, float]) -> Iterable[PromisedLine]:
    before, after, gain = measured
    limits = (
        ("before", before, measure.before_min, measure.before_max),
        ("after", after, measure.after_min, measure.after_max),
        ("gain", gain, measure.gain_min, None),
    )
    for column, value, minimum, maximum in limits:
        text = measure.text(value)
        if minimum is not None:
            yield PromisedLine(f"{name}: {column}", f">= {measure.text(minimum)}", text, value >= minimum - ROUNDING)
        if maximum is not None:
            yield PromisedLine(f"{name}: {column}", f"<= {measure.text(maximum)}", text, value <= maximum + ROUNDING)
