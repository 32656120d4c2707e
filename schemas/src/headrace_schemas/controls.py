"""The messages between `headrace controls` and the programs that it runs; see `headrace_schemas.replay`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_schemas.base import Finite, Model, Text, Version
from headrace_schemas.events.checkpoint import Checkpoint, DropReason

EXPERIENCES_MAX = 16_384
"""Most experiences of one short training: as many outcomes as one save may report."""


class ShortRun(Model):
    """The line `trained`, the only one of a short training."""

    base: Checkpoint
    last: Checkpoint
    """The base again where no step changed the weights."""
    trained: Annotated[int, Field(ge=0)]
    dropped: dict[DropReason, int] = Field(default_factory=dict)
    steps: Annotated[int, Field(ge=0)]
    stopped: str | None = None
    """Why `[trainer.health]` ended it early."""


class Measure(Model):
    """A line `measure` to the registry's filter: play so many audit tasks with this version."""

    version: Version
    plays: Annotated[int, Field(ge=1, le=1_000_000)]


class Measured(Model):
    """A line `measured`: task and score of each play, the same tasks and seeds in the same order for every version."""

    version: Version
    scores: tuple[tuple[Text, Finite], ...]
