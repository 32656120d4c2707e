"""The messages between a replay and the programs that it runs.

A replay has topics of its own, `replay-<lineage>-<topic>`. Each has one partition, so that its records have one order.
The programs (`python -m headrace_scorer.replay` and the like) are filters: they read lines from standard input and
write lines to standard output. Each line is a word, a space and JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, JsonValue

from headrace_schemas.base import Model, Sha256, Text
from headrace_schemas.events.checkpoint import DropReason, TrainingMetrics

BATCH_HEADER = "headrace_batch"
"""Header of a copied record: how many experiences the original lineage cut for a batch after it (decimal), those that
it left out included. One header for each batch, in order."""

LEFT_OUT_HEADER = "headrace_left_out"
"""Header of a copied record: the id of an experience that the original lineage left out of a batch that it cut after
the record. One header for each experience."""

TOPIC_PREFIX = "replay-"


def topic_prefix(lineage: str) -> str:
    """The first part of the names of the topics of the replay into `lineage`."""
    return f"{TOPIC_PREFIX}{lineage}-"


class ClosedLine(Model):
    """A line `closed`: a trajectory that exists, whether it is replayed or not.

    Feedback about a session is matched with one of its trajectories by their offsets.
    """

    trajectory_id: str
    session_key: str
    tenant: str
    time_ms: int
    """When it was closed. Trajectories that were closed together have the same time."""
    place: int
    """Offset on `trajectories`."""
    began: int | None = None
    """Offset of its first turn on `turns`; None when it was ingested."""
    partition: int | None = None
    """Of the record. Feedback about a task is there once for each."""


class FeedbackLine(Model):
    """A line `feedback`: a feedback event, its offset, and how far the logs reached then (see `Envelope.after`)."""

    event: dict[str, JsonValue]
    place: int
    turns_until: int | None = None
    trajectories_until: int | None = None


class ScoredLine(Model):
    """The line `scored`, the scorer's last one: counts of what became of the trajectories."""

    trajectories: Annotated[int, Field(ge=0)] = 0
    experiences: dict[str, int] = Field(default_factory=dict)
    """How many experiences, by `rewarded` or by the reason for no reward."""
    not_trained: dict[str, int] = Field(default_factory=dict)
    """Trajectories without experiences, by reason: `eval`, `nothing_sampled`, `unreadable` or `failed`."""
    outcomes: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Counts of each reward function's results, by source and outcome."""


class JudgedLine(Model):
    """The line `judged`, the judge's last one: counts by source and outcome."""

    outcomes: dict[str, dict[str, int]] = Field(default_factory=dict)


class RecordedBatch(Model):
    """A line `recorded`: a batch of the original lineage and what came of it. These lines come first, in order."""

    digest: Sha256
    left_out: tuple[Text, ...] = ()
    trained: bool = True
    """False: the gradient was not finite, and the experiences of the batch were dropped."""
    published: bool = False
    """Whether a version was made of the weights after the batch."""


def recorded_batches(accounts: Iterable[TrainingMetrics]) -> tuple[RecordedBatch, ...]:
    """Return all batches of a lineage, from its accounts in order, each account once."""
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
    """A batch that training would cut."""

    experiences: int
    digest: Sha256


class DryRunLine(Model):
    """The line `dry_run`, the only one of the trainer's filter: what training would do with the experiences."""

    trained: int = 0
    dropped: dict[DropReason, int] = Field(default_factory=dict)
    duplicates: int = 0
    other_models: int = 0
    waiting: int = 0
    """Experiences that are left over: too few for a batch."""
    batches: tuple[DryRunBatch, ...] = ()
    versions: int = 0
