"""Measurements between the beginning and the end of a demo: `[rows]` of a recipe, and their results."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace_cli.demo.measures import ROUNDING, DemoMeasure, MeasuredPlays, PromisedLine
from headrace_statistics import student_t


class RowsRecipe(BaseModel):
    """Points at which to measure, in a unit that the agent counts.

    The agent's command runs from each row to the next one, as `{row_before}` and `{row}`. It ends when it has reached
    the row, and with it the traffic; the version that serves then is measured.
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
        """Pairs of adjacent rows, between which the agent plays."""
        return tuple(itertools.pairwise(self.at))


@dataclass(frozen=True, slots=True)
class Row:
    """Means of the measures of one version over the same plays."""

    at: int
    version: str
    measures: Mapping[str, float]
    margins: Mapping[str, float] = field(default_factory=dict)
    """Half widths of the 95 % intervals over plays."""
    plays: int = 0

    @classmethod
    def of(cls, at: int, version: str, measures: Mapping[str, DemoMeasure], plays: MeasuredPlays) -> Row:
        """Compute the means of all measures.

        Raises:
            UsageError: a play has no number of a measure.
        """
        numbers_by_measure = {name: plays.numbers(measure.field) for name, measure in measures.items()}
        means = {name: statistics.fmean(numbers) for name, numbers in numbers_by_measure.items()}
        margins = {name: _margin(numbers) for name, numbers in numbers_by_measure.items()}
        return cls(at, version, means, margins, len(plays.lines))


def median_row(name: str, seeds: Sequence[Sequence[Row]]) -> list[float]:
    """Return the median of one measure over the seeds, for each row."""
    return [statistics.median(row.measures[name] for row in same) for same in zip(*seeds, strict=True)]


def row_lines(measures: Mapping[str, DemoMeasure], seeds: Sequence[Sequence[Row]]) -> Iterable[PromisedLine]:
    """Yield the promises about rows, checked with the medians over `seeds`. A row without a measurement fails."""
    at = [row.at for row in seeds[0]]
    for name, measure in measures.items():
        values = dict(zip(at, median_row(name, seeds), strict=True))
        for position, minimum in measure.at_min.items():
            value = values.get(position, math.nan)
            text = measure.text(value) if position in values else "not measured"
            yield PromisedLine(
                f"{name}: at {position}", f">= {measure.text(minimum)}", text, value >= minimum - ROUNDING
            )
        if measure.rises:
            increases = len(values) > 1 and all(
                value < next_value for value, next_value in itertools.pairwise(values.values())
            )
            text = ", ".join(map(measure.text, values.values()))
            yield PromisedLine(f"{name}: rises", "each row above the row before", text, increases)


def _margin(numbers: Sequence[float]) -> float:
    return student_t.mean_margin(numbers, 0.975) if len(numbers) > 1 else 0.0
