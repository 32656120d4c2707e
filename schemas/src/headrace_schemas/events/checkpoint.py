"""`checkpoints` and `training-metrics`: new versions, and what became of each experience that was read."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from headrace_schemas.base import Event, Finite, LongText, Model, ModelName, Sha256, Text, Version
from headrace_schemas.blobs import BlobRef
from headrace_schemas.bounds import INT32, INT64
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


LISTED_MAX = 65_536
"""Most entries of each list of an account."""


class Checkpoint(Event):
    """A new version exists in the blob store. Produced by the trainer after the checkpoint is durable."""

    topic: ClassVar[str] = "checkpoints"
    type: ClassVar[str] = "headrace.checkpoint.v1"

    model: ModelName
    version: Version
    lineage: Text
    step: Annotated[int, Field(ge=0), INT32]
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


class TrainingOutcome(Model):
    """What became of one experience revision in one lineage. Its title in the JSON schema is `Verdict`."""

    model_config = ConfigDict(title="Verdict")

    experience_id: Text
    revision: Annotated[int, Field(ge=0), INT32]
    turn_ids: tuple[Text, ...] = Field(max_length=4096)
    dropped: DropReason | None = None
    """None: it was trained, so it changed the weights."""
    detail: Text | None = None
    """More exactly than `dropped`: `no_signal` (it carries nothing that the algorithm trains), `unpaired` (the other
    answer of its comparison never came), `written` (nobody sampled its tokens, and the algorithm needs logprobs),
    `equal_rewards` (all runs of its group have one), `edit` (the model cannot be made to say what it was edited to),
    `examples` (more than one experience may give), `excluded` (a version answered it that its rollout took back)."""

    @property
    def reason(self) -> str | None:
        """Why it was dropped, as exactly as it is known; None: it was trained."""
        return self.detail or self.dropped


class Undone(Model):
    """The outcome of a revision that is taken back.

    Either the revision was trained and the weights lost it again: the registry refused the version, and the weights
    went back to a step before it. Or the revision was dropped and is queued now.
    """

    experience_id: Text
    revision: Annotated[int, Field(ge=0), INT32]
    queued: bool
    """True: the revision waits to be trained, and another outcome follows. False: it is never trained again."""


class Restored(Model):
    """A revision that the weights hold again, because the registry promoted a version after all that was trained on it.

    Every outcome that was reported for the revision in between is void.
    """

    experience_id: Text
    revision: Annotated[int, Field(ge=0), INT32]


class Read(Model):
    """A range of `experiences`: the records of one partition before offset `until` that were not read before."""

    partition: Annotated[int, Field(ge=0), INT32]
    until: Annotated[int, Field(ge=1), INT64]


class BatchRecord(Model):
    """What is needed to build a batch again (P9): which records were read before it, and the digest of the result.

    Its title in the JSON schema is `Batch`.

    `digest` covers ids, tokens, masks, logprobs, temperatures and advantages. It does not cover weights, so a rebuilt
    batch can be compared without training.
    """

    model_config = ConfigDict(title="Batch")

    step: Annotated[int, Field(ge=0), INT32]
    """Number of this step in the lineage. A batch whose gradient was not finite has the number of the step before."""
    experiences: Annotated[int, Field(ge=1), INT32]
    digest: Sha256
    read: tuple[Read, ...] = Field(default=(), max_length=LISTED_MAX)
    """In reading order, since the previous batch; for the first batch of an account, since the previous account."""
    left_out: tuple[Text, ...] = Field(default=(), max_length=LISTED_MAX)
    """Experiences that were cut with the batch, or since the batch before it, and that the step cannot train. They are
    dropped as `invalid` and are not counted in `experiences`."""


class TrainingMetrics(Event):
    """What happened to each experience between two saves of a lineage. Sent once the later save is durable.

    After a crash the trainer repeats work but never reports it twice: `event_id` names the save.
    """

    topic: ClassVar[str] = "training-metrics"
    type: ClassVar[str] = "headrace.training-metrics.v1"

    model: ModelName
    lineage: Text
    step: Annotated[int, Field(ge=0), INT32]
    account: Annotated[int, Field(ge=0), INT32] = 0
    """Number of the save in its lineage. A save without a new version (only drops) has a number, too."""
    version: Version | None = None
    metrics: dict[Text, Finite] = Field(default_factory=dict, max_length=256)
    verdicts: tuple[TrainingOutcome, ...] = Field(default=(), max_length=LISTED_MAX)
    stopped: LongText | None = None
    """Why training stopped: a health measure stayed beyond its limit. An operator has to resume it."""
    undone: tuple[Undone, ...] = Field(default=(), max_length=LISTED_MAX)
    """Applied after all `verdicts` of this account and of earlier accounts. What does not fit is in the accounts that
    follow, before anything else becomes of these revisions; so it is with `restored`."""
    restored: tuple[Restored, ...] = Field(default=(), max_length=LISTED_MAX)
    """Applied after all `verdicts`, too. No revision is in both `undone` and `restored`."""
    batches: tuple[BatchRecord, ...] = Field(default=(), max_length=LISTED_MAX)
    read: tuple[Read, ...] = Field(default=(), max_length=LISTED_MAX)
    """What was read after the last batch."""

    @property
    def event_id(self) -> str:
        return derived_id("training-metrics", self.lineage, self.account)

    @property
    def key(self) -> str:
        return self.model
