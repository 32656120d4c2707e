"""A demo that is measured between its beginning and its end, too: `[rows]` of a recipe, and what was found."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


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


def median_row(name: str, seeds: Sequence[Sequence[Row]]) -> list[float]:
    """One measure at each row, the median over the seeds."""
    return [statistics.median(row.measures[name] for row in same) for same in zip(*seeds, strict=True)]
