"""A demo that is measured between its beginning and its end, too: `[rows]` of a recipe, and what was found."""

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
    """When to measure, in whatever the agent counts.

    The agent's command is run from each row to the next one, as `{row_before}` and `{row}`. It ends by itself when it
    has got there, and with it the traffic: what answers then is measured, and nothing else goes on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: Annotated[str, Field(min_length=1)]
    """Rounds, games."""
    at: Annotated[tuple[int, ...], Field(min_length=2)]
    """Ascending from 0, which is the first version."""

    @model_validator(mode="after")
    def _ascend_from_0(self) -> Self:
        if self.at[0] != 0 or any(one >= following for one, following in itertools.pairwise(self.at)):
            raise ValueError(f"at = {list(self.at)}: rows ascend from 0, for example [0, 5, 10]")
        return self

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """What the agent plays between two rows."""
        return tuple(itertools.pairwise(self.at))


@dataclass(frozen=True, slots=True)
class Row:
    """Means over the same plays, of the version that answered then."""

    at: int
    version: str
    measures: Mapping[str, float]
    margins: Mapping[str, float] = field(default_factory=dict)
    """Half the width of each one's 95 % interval over plays."""
    plays: int = 0

    @classmethod
    def of(cls, at: int, version: str, measures: Mapping[str, DemoMeasure], played: MeasuredPlays) -> Row:
        """Raises `UsageError` when a play has no number of a measure."""
        found = {name: played.numbers(measure.field) for name, measure in measures.items()}
        means = {name: statistics.fmean(numbers) for name, numbers in found.items()}
        return cls(at, version, means, {name: _margin(numbers) for name, numbers in found.items()}, len(played.lines))


def median_row(name: str, seeds: Sequence[Sequence[Row]]) -> list[float]:
    """One measure at each row, the median over the seeds."""
    return [statistics.median(row.measures[name] for row in same) for same in zip(*seeds, strict=True)]


def row_lines(measures: Mapping[str, DemoMeasure], seeds: Sequence[Sequence[Row]]) -> Iterable[PromisedLine]:
    """What is promised of rows, of the medians over `seeds`. A row that nobody measured fails what it promised."""
    at = [row.at for row in seeds[0]]
    for name, measure in measures.items():
        found = dict(zip(at, median_row(name, seeds), strict=True))
        for place, least in measure.at_min.items():
            value = found.get(place, math.nan)
            text = measure.text(value) if place in found else "not measured"
            yield PromisedLine(f"{name}: at {place}", f">= {measure.text(least)}", text, value >= least - ROUNDING)
        if measure.rises:
            rising = len(found) > 1 and all(one < other for one, other in itertools.pairwise(found.values()))
            text = ", ".join(map(measure.text, found.values()))
            yield PromisedLine(f"{name}: rises", "each row above the one before", text, rising)


def _margin(numbers: Sequence[float]) -> float:
    return student_t.mean_margin(numbers, 0.975) if len(numbers) > 1 else 0.0
