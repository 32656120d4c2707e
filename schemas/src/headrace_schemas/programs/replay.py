"""Line protocols between a replay or `headrace controls` and the programs that they run.

A replay has its own topics, `replay-<lineage>-<topic>`, with one partition each, so that their records are ordered. The
programs (for example `python -m headrace_scorer.replay`) read lines from standard input and write lines to standard
output. Each line consists of a word, a space and JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, JsonValue

from headrace_schemas.events.checkpoint import Checkpoint, DropReason, TrainingMetrics
from headrace_schemas.values.base import Finite, Model, Sha256, Text, Version

BATCH_HEADER = "headrace_batch"
"""Header of a copied record for each batch that the original lineage cut after the record, in order. Its value is the
decimal number of experiences in the batch, including those that were left out."""

LEFT_OUT_HEADER = "headrace_left_out"
"""Header of a copied record for each experience that the original lineage left out of a batch which it cut after the
record. Its value is the id of the experience."""

TOPIC_PREFIX = "replay-"


def topic_prefix(lineage: str) -> str:
    """Return the prefix of the topic names of the replay into `lineage`."""
    return f"{TOPIC_PREFIX}{lineage}-"


class ClosedLine(Model):
    """A line `closed`: an existing trajectory, whether it is replayed or not.

    The offsets determine with which trajectory of a session its feedback is matched.
    """

    trajectory_id: str
    session_key: str
    tenant: str
    time_ms: int
    """The time at which it was closed. Trajectories that were closed together have the same time."""
    place: int
    """Offset of the trajectory on `trajectories`."""
    began: int | None = None
    """Offset of its first turn on `turns`, or None if it was ingested."""
    partition: int | None = None
    """Partition of the record. Feedback about a task has one copy per partition."""


class FeedbackLine(Model):
    """A line `feedback`: a feedback event, its offset, and the end offsets at that time (see `Envelope.after`)."""

    event: dict[str, JsonValue]
    place: int
    turns_until: int | None = None
    trajectories_until: int | None = None


class ScoredLine(Model):
    """The line `scored`, the last one of the scorer: counts of the results by kind."""

    trajectories: Annotated[int, Field(ge=0)] = 0
    experiences: dict[str, int] = Field(default_factory=dict)
    """Number of experiences by `rewarded` or by the reason for no reward."""
    not_trained: dict[str, int] = Field(default_factory=dict)
    """Number of trajectories without experiences by reason: `eval`, `nothing_sampled`, `unreadable` or `failed`."""
    outcomes: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Number of results of reward functions by source and outcome."""


class JudgedLine(Model):
    """The line `judged`, the last one of the judge: counts by source and outcome."""

    outcomes: dict[str, dict[str, int]] = Field(default_factory=dict)


class RecordedBatch(Model):
    """A line `recorded`: a batch of the original lineage and its result. These lines come first, in order."""

    digest: Sha256
    left_out: tuple[Text, ...] = ()
    trained: bool = True
    """False if the gradient was not finite, so that the experiences of the batch were dropped."""
    published: bool = False
    """Whether the weights after the batch were published as a version."""


def recorded_batches(accounts: Iterable[TrainingMetrics]) -> tuple[RecordedBatch, ...]:
    """Return all batches of a lineage.

    Args:
        accounts: the accounts of the lineage in order, each once.
    """
    batches: list[RecordedBatch] = []
    steps = 0
    for account in accounts:
        for batch in account.batches:
            trained = batch.step > steps
            batches.append(RecordedBatch(digest=batch.digest, left_out=batch.left_out, trained=trained))
            steps = batch.step
        if account.version is not None and batches:
            batches[-1] = batches[-1].model_copy(update={"published": True})
    return tuple(batches)


class DryRunBatch(Model):
    """A batch that the trainer would cut."""

    experiences: int
    digest: Sha256


class DryRunLine(Model):
    """Line `dry_run`, the single line of the trainer's dry run: the predicted training outcome of each experience."""

    trained: int = 0
    dropped: dict[DropReason, int] = Field(default_factory=dict)
    duplicates: int = 0
    other_models: int = 0
    waiting: int = 0
    """Number of remaining experiences, too few for a batch."""
    batches: tuple[DryRunBatch, ...] = ()
    versions: int = 0


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
