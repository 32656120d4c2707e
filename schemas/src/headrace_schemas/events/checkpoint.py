"""`checkpoints` and `training-metrics`: what the trainer made, of what, and how it went."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headrace_schemas.base import Event, Finite, LongText, Model, ModelName, Sha256, Text, Version
from headrace_schemas.blobs import BlobRef
from headrace_schemas.ids import derived_id

DropReason = Literal[
    "stale",
    "foreign_version",
    "superseded",
    "already_trained",
    "unchanged",
    "singleton",
    "invalid",
    "too_long",
    "overflow",
    "no_reward",
    "required_source_missing",
    "withdrawn",
]


class Checkpoint(Event):
    """A new version exists in the blob store. Produced by the trainer after the checkpoint is durable."""

    topic: ClassVar[str] = "checkpoints"
    type: ClassVar[str] = "headrace.checkpoint.v1"

    model: ModelName
    version: Version
    lineage: Text
    step: Annotated[int, Field(ge=0)]
    parent: Version | None = None
    manifest: BlobRef
    metrics: dict[Text, Finite] = Field(default_factory=dict, max_length=256)

    @property
    def event_id(self) -> str:
        return derived_id("checkpoint", self.lineage, self.version)

    @property
    def key(self) -> str:
        return self.model

    @property
    def subject(self) -> str:
        return self.version


class Verdict(Model):
    """What became of one experience revision in one lineage."""

    experience_id: Text
    revision: Annotated[int, Field(ge=0)]
    turn_ids: tuple[Text, ...] = Field(max_length=4096)
    dropped: DropReason | None = None
    """None: it changed the weights."""


class Undone(Model):
    """A verdict that is taken back. A revision had changed the weights and has not any more: they went back behind the
    step, because the registry refused what was made of it. Or a later one had been dropped, and is queued instead."""

    experience_id: Text
    revision: Annotated[int, Field(ge=0)]
    queued: bool
    """It waits to be trained, and another verdict will follow; else it is given up."""


class Restored(Model):
    """A revision that the weights hold again: they came forward to a version that was made of it, because the registry
    promoted that one after all. Whatever was said of it since does not count."""

    experience_id: Text
    revision: Annotated[int, Field(ge=0)]


class Read(Model):
    """Records of `experiences` that were read in one go: all of a partition before offset `until` that were not yet."""

    partition: Annotated[int, Field(ge=0)]
    until: Annotated[int, Field(ge=1)]


class Batch(Model):
    """A batch as far as it can be built again (P9): what was read before it was cut, and what it came to.

    `digest` is over ids, tokens, masks, logprobs, temperatures and advantages, and not over weights, so that whoever
    builds the batch again can compare without training.
    """

    step: Annotated[int, Field(ge=0)]
    """Steps of the lineage with this one; a batch whose gradient was not finite has the number of the one before."""
    experiences: Annotated[int, Field(ge=1)]
    digest: Sha256
    read: tuple[Read, ...] = Field(default=(), max_length=65_536)
    """In this order, since the batch before it or, for the first one, since the account before this."""


class TrainingMetrics(Event):
    """The account of everything between two checkpoints of a lineage. Sent after the later one is durable.

    A crash makes the trainer do work again but never report it twice: `event_id` names the checkpoint.
    """

    topic: ClassVar[str] = "training-metrics"
    type: ClassVar[str] = "headrace.training-metrics.v1"

    model: ModelName
    lineage: Text
    step: Annotated[int, Field(ge=0)]
    account: Annotated[int, Field(ge=0)] = 0
    """Counts the saves of a lineage; a save without a new version (only drops) has its own number."""
    version: Version | None = None
    metrics: dict[Text, Finite] = Field(default_factory=dict, max_length=256)
    verdicts: tuple[Verdict, ...] = Field(default=(), max_length=65_536)
    stopped: LongText | None = None
    """Why nothing is trained any more, until somebody says so: a measure stayed beyond its limit."""
    undone: tuple[Undone, ...] = Field(default=(), max_length=65_536)
    """After all `verdicts` of this account and of those before."""
    restored: tuple[Restored, ...] = Field(default=(), max_length=65_536)
    """The same. No revision is in both."""
    batches: tuple[Batch, ...] = Field(default=(), max_length=65_536)
    read: tuple[Read, ...] = Field(default=(), max_length=65_536)
    """After the last batch."""

    @property
    def event_id(self) -> str:
        return derived_id("training-metrics", self.lineage, self.account)

    @property
    def key(self) -> str:
        return self.model
