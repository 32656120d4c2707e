"""Declared values of reward sources. The scorer applies them, and the gateway refuses what the scorer would refuse."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from headrace_runtime.settings import Section
from headrace_schemas.base import Text
from headrace_schemas.bounds import Score
from headrace_schemas.source_patterns import fits
from headrace_schemas.text import printable


class SourceValues(Section):
    """Part of the section `scorer`: the ranges of sources, and the values of labels."""

    ranges: dict[Text, tuple[Score, Score]] = Field(default_factory=dict)
    """The least and the largest value of sources, e.g. `{ feedback = [0, 1] }`; the first pattern that fits counts.
    The gateway refuses feedback outside it, where it has this section in its settings; the scorer dead-letters feedback
    and rewards outside it, and a reward function's call has failed."""
    labels: dict[Text, Score] = Field(default_factory=dict)
    """The value of each label that feedback may carry, e.g. `{ good = 1.0, bad = 0.0 }`. Other labels are kept and
    abstain."""

    @model_validator(mode="after")
    def _ranges_have_room(self) -> Self:
        for pattern, (low, high) in self.ranges.items():
            if low >= high:
                raise ValueError(f"ranges.{pattern} = [{low:g}, {high:g}]: the first number must be below the second")
        return self

    def violation(self, source: str, value: float | None) -> str | None:
        """Return why `source` must not give `value`; None when it may."""
        limits = next((limits for pattern, limits in self.ranges.items() if fits(pattern, source)), None)
        if value is None or limits is None or limits[0] <= value <= limits[1]:
            return None
        return (
            f"{printable(source)} = {value:g}: must be from {limits[0]:g} to {limits[1]:g} (scorer.ranges); send it in "
            "this unit, or change the range"
        )
