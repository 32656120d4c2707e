"""Settings of the permitted values of reward sources, which scorer and gateway enforce."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from headrace_runtime.settings.sections import Section
from headrace_schemas.values.base import Text
from headrace_schemas.values.bounds import Score
from headrace_schemas.values.ids import first_match
from headrace_schemas.values.text import printable


class SourceValues(Section):
    """Settings of the section `scorer` that the gateway reads, too: ranges of sources and values of labels."""

    ranges: dict[Text, tuple[Score, Score]] = Field(default_factory=dict)
    """Smallest and largest value by pattern of sources, for example `{ feedback = [0, 1] }`. The first matching pattern
    counts. The gateway refuses feedback outside the range if its settings have this section. The scorer dead-letters
    such feedback and rewards, and counts such a result of a reward function as a failure."""
    labels: dict[Text, Score] = Field(default_factory=dict)
    """Value of each label of feedback, for example `{ good = 1.0, bad = 0.0 }`. Other labels are stored and abstain."""

    @model_validator(mode="after")
    def _ranges_have_room(self) -> Self:
        for pattern, (low, high) in self.ranges.items():
            if low >= high:
                raise ValueError(f"ranges.{pattern} = [{low:g}, {high:g}]: the first number must be below the second")
        return self

    def violation(self, source: str, value: float | None) -> str | None:
        """Return a message about the range of `source` if `value` is outside of it, else None."""
        limits = first_match(self.ranges, source)
        if value is None or limits is None or limits[0] <= value <= limits[1]:
            return None
        return (
            f"{printable(source)} = {value:g}: must be from {limits[0]:g} to {limits[1]:g} (scorer.ranges); send it in "
            "this unit, or change the range"
        )
