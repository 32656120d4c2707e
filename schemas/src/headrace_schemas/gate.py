"""The messages between the registry's gate and the program that plays held-out tasks: JSON lines on stdin and stdout.

First the program prints one `Tasks`. Then it reads a `Play` per line, plays as many at a time as it likes, and prints a
`Played` for each, in any order. It ends when its standard input ends.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headrace_schemas.base import Finite, Model, Text, Version

Names = Annotated[tuple[Text, ...], Field(min_length=1, max_length=100_000)]


class Tasks(Model):
    """The first line: the names of all tasks. A task that is listed twice counts twice. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    gate: Names
    """Tasks that decide which version may serve."""
    audit: Names
    """Tasks that only measure. Reported scores come from them alone."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        both = set(self.gate) & set(self.audit)
        if both:
            raise ValueError(f"{len(both)} tasks are in both gate and audit, e.g. {min(both)!r}")
        return self


class Play(Model):
    """A line to the program: play this task with this version, random numbers drawn from `seed`."""

    version: Version
    task: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)]


class Played(Model):
    """A line from the program: the score of a play. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    version: Version
    task: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    score: Annotated[Finite, Field(ge=0, le=1)]
