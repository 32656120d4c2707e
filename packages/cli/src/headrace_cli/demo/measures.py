"""What a demo measures of a version besides its score, and what is promised of it: `[measures.NAME]` of a recipe."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import UsageError

ROUNDING = 1e-9
"""A sum of shares may miss its own value by this much."""


class DemoMeasure(BaseModel):
    """The mean of one field of the lines that the recipe's `measure` prints, and its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: Annotated[str, Field(min_length=1)]
    percent: bool = False
    """Told as a share of 100; limits are in 0..1 all the same."""
    before_min: float | None = None
    before_max: float | None = None
    """Where the first version has to begin: who begins at the goal has nothing to learn."""
    after_min: float | None = None
    after_max: float | None = None
    gain_min: float | None = None
    """By how much the last version has to be above the first one."""
    at_min: dict[int, float] = Field(default_factory=dict)
    """The least at a row: `{ 500 = 0.67 }`."""
    rises: bool = False
    """Each row has to be above the one before."""

    def text(self, value: float) -> str:
        return f"{value:.1%}" if self.percent else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """Means over the same plays of the first and of the last version."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class MeasuredPlays:
    """What `measure` printed of one version, a mapping for each play. Never empty."""

    lines: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, output: bytes) -> MeasuredPlays:
        return cls(tuple(json.loads(line) for line in output.splitlines() if line.strip()))

    def mean(self, name: str) -> float:
        """Raises `UsageError` when a play has no such number."""
        return statistics.fmean(self.numbers(name))

    def numbers(self, name: str) -> list[float]:
        """Of each play. Raises `UsageError` when a play has no such number."""
        found = [line.get(name) for line in self.lines]
        numbers = [float(value) for value in found if isinstance(value, int | float)]
        if len(numbers) < len(found):
            raise UsageError(f"{len(found) - len(numbers)} of {len(found)} measured plays have no number {name!r}")
        return numbers

    def shown(self, name: str) -> dict[str, str]:
        """A text of each play, by its task."""
        return {str(line["task"]): str(line[name]) for line in self.lines if name in line and "task" in line}


@dataclass(frozen=True, slots=True)
class PromisedLine:
    """One thing that is promised of a measure, over one seed or the median of several."""

    name: str
    wanted: str
    found: str
    holds: bool


def lines(measures: Mapping[str, DemoMeasure], seeds: Sequence[Mapping[str, BeforeAfter]]) -> list[PromisedLine]:
    """What is promised, of the medians over `seeds`."""
    return [line for name, measure in measures.items() for line in _lines(name, measure, medians(name, seeds))]


def medians(name: str, seeds: Sequence[Mapping[str, BeforeAfter]]) -> tuple[float, float, float]:
    """Before, after and gain: the median of each over the seeds, the gain being that of a seed."""
    found = [seed[name] for seed in seeds]
    columns = ([one.before for one in found], [one.after for one in found], [one.after - one.before for one in found])
    before, after, gain = map(statistics.median, columns)
    return before, after, gain


def _lines(name: str, measure: DemoMeasure, found: tuple[float, float, float]) -> Iterable[PromisedLine]:
    before, after, gain = found
    limits = (
        ("before", before, measure.before_min, measure.before_max),
        ("after", after, measure.after_min, measure.after_max),
        ("gain", gain, measure.gain_min, None),
    )
    for what, value, least, most in limits:
        text = measure.text(value)
        if least is not None:
            yield PromisedLine(f"{name}: {what}", f">= {measure.text(least)}", text, value >= least - ROUNDING)
        if most is not None:
            yield PromisedLine(f"{name}: {what}", f"<= {measure.text(most)}", text, value <= most + ROUNDING)
