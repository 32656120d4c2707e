"""What the registry's gate and a program that plays held-out tasks say to each other: JSON lines on its stdin and
stdout.

The program speaks first, one `Tasks`. Then it reads a `Play` per line, plays as many at a time as it likes, and
prints a `Played` for each, in any order. When its standard input ends, so does it.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headrace_schemas.base import Finite, Model, Text, Version

Names = Annotated[tuple[Text, ...], Field(min_length=1, max_length=100_000)]


class Tasks(Model):
    """The first line: the names of all tasks. One that stands there twice counts twice as much. Other fields pass."""

    model_config = ConfigDict(extra="ignore")

    gate: Names
    """Those that decide which version may serve."""
    audit: Names
    """Those that decide nothing. Scores that people are told come from them alone."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        both = set(self.gate) & set(self.audit)
        if both:
            raise ValueError(f"{len(both)} tasks stand in both gate and audit, e.g. {min(both)!r}")
        return self


class Play(Model):
    """A line to the program: play this task with this version, random numbers drawn from `seed`."""

    version: Version
    task: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)]


class Played(Model):
    """A line from the program: what that play came to. Other fields are the program's own business."""

    model_config = ConfigDict(extra="ignore")

    version: Version
    task: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    score: Annotated[Finite, Field(ge=0, le=1)]
