"""What a replay and the programs that take part in it say to each other.

A replay has topics of its own, `replay-<lineage>-<topic>` with one partition each, so that their order is one. Programs
that work on many events at once (`python -m headrace_scorer.replay` and the like) are filters: lines on standard input
and output, each a word, a space and JSON on the rest of the line.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from headrace_schemas.base import Model, Sha256
from headrace_schemas.events.checkpoint import DropReason

BATCH_HEADER = "headrace_batch"
"""On a copied record: after it the original lineage cut a batch of so many experiences (decimal text)."""


TOPIC_PREFIX = "replay-"


def topic_prefix(lineage: str) -> str:
    """What the topics of the replay into `lineage` begin with."""
    return f"{TOPIC_PREFIX}{lineage}-"


class Closed(Model):
    """A line `closed`: a trajectory that exists, whether it is replayed or not. Feedback about a session is told by
    their places on the log which of its trajectories it means."""

    trajectory_id: str
    session_key: str
    tenant: str
    time_ms: int
    """Those of one closing have one time."""
    place: int
    """Offset on `trajectories`."""
    began: int | None = None
    """Offset of its first turn on `turns`; None when it was ingested."""


class Heard(Model):
    """A line `feedback`: what was said, and its places on the log (see `Envelope.after`)."""

    event: dict[str, JsonValue]
    place: int
    turns_until: int | None = None
    trajectories_until: int | None = None


class Scored(Model):
    """The line `scored`, the last one of the scorer: what became of the trajectories."""

    trajectories: Annotated[int, Field(ge=0)] = 0
    experiences: dict[str, int] = Field(default_factory=dict)
    """`rewarded`, or why there is no reward, to how many."""
    not_trained: dict[str, int] = Field(default_factory=dict)
    """Trajectories without experiences: held out (`eval`), with `nothing_sampled`, or `unreadable`."""
    outcomes: dict[str, dict[str, int]] = Field(default_factory=dict)
    """What each reward function came to: source to outcome to how many."""


class Judged(Model):
    """The line `judged`, the last one of the judge: source to outcome to how many."""

    outcomes: dict[str, dict[str, int]] = Field(default_factory=dict)


class RehearsedBatch(Model):
    """A batch that training would make."""

    experiences: int
    digest: Sha256


class Rehearsed(Model):
    """The line `rehearsed`, the only one of the trainer's rehearsal: what training would do with the experiences."""

    trained: int = 0
    dropped: dict[DropReason, int] = Field(default_factory=dict)
    duplicates: int = 0
    other_models: int = 0
    waiting: int = 0
    """Left over, too few for a batch."""
    batches: tuple[RehearsedBatch, ...] = ()
    versions: int = 0
