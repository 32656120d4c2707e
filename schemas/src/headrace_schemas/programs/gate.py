"""Protocol between the registry's gate and the program that plays held-out tasks: JSON lines on stdin and stdout.

The program first prints one `Tasks`. Then it reads one `Play` per line and prints one `Played` for each, in any order
and with any number of concurrent plays. It exits at the end of its standard input.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headrace_schemas.values.base import Finite, Model, Text, Version

Names = Annotated[tuple[Text, ...], Field(min_length=1, max_length=100_000)]


class Tasks(Model):
    """The first line of the program: the names of all tasks.

    A task that is listed twice counts twice. Other fields are ignored.
    """

    model_config = ConfigDict(extra="ignore")

    gate: Names
    """The tasks that decide whether a version may serve."""
    audit: Names
    """The tasks that take part in no decision. Only their scores are reported."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        both = set(self.gate) & set(self.audit)
        if both:
            raise ValueError(f"{len(both)} tasks are in both gate and audit, e.g. {min(both)!r}")
        return self


class Play(Model):
    """A line to the program: the request to play a task with a version and the random seed `seed`."""

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
