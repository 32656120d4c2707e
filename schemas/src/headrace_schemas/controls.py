"""Line protocol between `headrace controls` and its programs. `headrace_schemas.replay` describes the format."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_schemas.base import Finite, Model, Text, Version
from headrace_schemas.events.checkpoint import Checkpoint, DropReason

EXPERIENCES_MAX = 16_384
"""Maximum number of experiences in one short training, so that one save can report all outcomes."""


class ShortRun(Model):
    """The line `trained`, the only one of a short training: its versions and outcomes."""

    base: Checkpoint
    last: Checkpoint
    """The last version. It is the base if no step changed the weights."""
    trained: Annotated[int, Field(ge=0)]
    dropped: dict[DropReason, int] = Field(default_factory=dict)
    steps: Annotated[int, Field(ge=0)]
    stopped: str | None = None
    """The reason why `[trainer.health]` stopped the training early."""


class Measure(Model):
    """A line `measure` to the registry's program: the request for a number of plays of audit tasks with a version."""

    version: Version
    plays: Annotated[int, Field(ge=1, le=1_000_000)]


class Measured(Model):
    """A line `measured`: task and score of each play. Tasks, seeds and their order are the same for all versions."""

    version: Version
    scores: tuple[tuple[Text, Finite], ...]
