"""Events of `checkpoints`, `training-metrics` and `model-events`: new versions, the outcome of each experience, and
all decisions about versions.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from headrace_schemas.values.base import Event, Finite, LongText, Model, ModelName, Sha256, Share, Text, Version
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.bounds import INT32, INT64
from headrace_schemas.values.ids import derived_id

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

_NAME = re.compile(r"[a-z_]{1,32}")
LISTED_MAX = 65_536
"""Maximum length of each list of an account."""
TURNS_MAX = 4096
"""Maximum number of turns of an experience."""
STATISTICS_MAX = 64
Decision = Literal["registered", "probed", "evaluated", "promoted", "rejected", "skipped", "rolled_back", "withdrawn"]


class LearnedSignals(Model):
    """The kinds of feedback that the algorithm of a lineage trains. Each algorithm announces them itself."""

    algorithm: Text
    rewards: bool
    """Whether values, thumbs, ratings and labels are trained."""
    edits: bool
    preferences: bool
    logprobs: bool
    """Whether answers are trained by the logprobs of the policy that sampled them. If so, rewards and preferences train
    no answer without them."""


class Checkpoint(Event):
    """Announcement of a new version in the blob store. The trainer sends it once the checkpoint is durable."""

    topic: ClassVar[str] = "checkpoints"
    type: ClassVar[str] = "headrace.checkpoint.v1"

    model: ModelName
    version: Version
    lineage: Text
    step: Annotated[int, Field(ge=0), INT32]
    parent: Version | None = None
    manifest: BlobRef
    metrics: dict[Text, Finite] = Field(default_factory=dict, max_length=256)
    learns: LearnedSignals | None = None
    """The signals that the trainer learns from since it announced this version, or None if it does not train live
    traffic. After a restart the announcement is sent again with the present value."""

    @property
    def event_id(self) -> str:
        return derived_id("checkpoint", self.lineage, self.version)

    @property
    def key(self) -> str:
        return self.model

    @property
    def subject(self) -> str:
        return self.version


class TurnAdvantage(Model):
    """Advantage with which a step trained the answer of one turn: its mean over the tokens of the answer."""

    turn_id: Text
    advantage: Finite
    edited: bool = False
    """Whether the step trained an edit of the answer in place of the sampled answer."""


class TrainingOutcome(Model):
    """The outcome of one revision of an experience in one lineage. Its title in the JSON schema is `Verdict`."""

    model_config = ConfigDict(title="Verdict")

    experience_id: Text
    revision: Annotated[int, Field(ge=0), INT32]
    turn_ids: tuple[Text, ...] = Field(max_length=TURNS_MAX)
    dropped: DropReason | None = None
    """The reason why it was dropped, or None if it was trained, so that it changed the weights."""
    detail: Text | None = None
    """Detail of the reason: `no_signal` (it has no signal that the algorithm trains), `no_logprobs` (none of its
    answers has the logprobs that the algorithm needs), `unpaired` (the other answer of its preference never arrived),
    `written` (its tokens were not sampled, and the algorithm needs logprobs), `equal_rewards` (all runs of its group
    have the same reward), `edit` (the chat template cannot render the edited answer), `examples` (it exceeds the number
    of examples per experience), `excluded` (its version was rolled back), `grammar`,
    `grammar_library`, `tokenizer`, `vocabulary`, `stored_sets`, `sets_size`, `restricted` (the tokens that its answers
    were sampled from cannot be computed)."""
    left_out: tuple[Text, ...] = Field(default=(), max_length=TURNS_MAX)
    """Turns of the experience that were not trained, because the algorithm needs logprobs that their answers lack."""
    advantage: Finite | None = None
    """The advantage that the loss used for the whole branch, as a mean over its tokens: the step made the answers
    likelier if it is positive. A correction has the advantage that the weights lacked, so the sum over all outcomes of
    an experience that were not undone is what the weights hold. 0 if the loss left the branch out. None if the revision
    was dropped, if only single answers were trained, if a teacher computed an advantage for each token, and in reports
    of earlier releases."""
    turn_advantages: tuple[TurnAdvantage, ...] = Field(default=(), max_length=TURNS_MAX)
    """The advantages of single turns: of answers that were trained alone or edited, and of all trained turns of a
    branch whose turns have advantages of their own."""

    @property
    def reason(self) -> str | None:
        """The most detailed reason why it was dropped, or None if it was trained."""
        return self.detail or self.dropped

    @property
    def reason_name(self) -> str | None:
        """The reason as a short name, for counters: `dropped` where the detail is the text of an error."""
        return self.detail if self.detail is not None and _NAME.fullmatch(self.detail) else self.dropped


class RevertedOutcome(Model):
    """A revision of an experience whose reported outcome no longer holds. Its title in the JSON schema is `Undone`.

    Either the revision was trained and the weights no longer contain it, because the registry refused the version and
    the weights were reset to an earlier step. Or the revision was dropped and is queued now.
    """

    model_config = ConfigDict(title="Undone")

    experience_id: Text
    revision: Annotated[int, Field(ge=0), INT32]
    queued: bool
    """Whether the revision is queued for training, so that another outcome follows. Otherwise it is never trained."""


class RestoredOutcome(Model):
    """A revision of an experience that the weights contain again, because a version trained on it was promoted later.

    Outcomes that were reported for the revision in the meantime are void. Its title in the JSON schema is `Restored`.
    """

    model_config = ConfigDict(title="Restored")

    experience_id: Text
    revision: Annotated[int, Field(ge=0), INT32]


class PartitionRead(Model):
    """Records of one partition of the topic `experiences`: from the end of the previous range up to offset `until`.

    Its title in the JSON schema is `Read`.
    """

    model_config = ConfigDict(title="Read")

    partition: Annotated[int, Field(ge=0), INT32]
    until: Annotated[int, Field(ge=1), INT64]


class BatchRecord(Model):
    """The data for rebuilding a batch: the records that were read before it, and the digest of the result.

    `digest` covers ids, tokens, masks, logprobs, temperatures and advantages. It does not cover weights, so a rebuilt
    batch can be compared without training. The title of this class in the JSON schema is `Batch`.
    """

    model_config = ConfigDict(title="Batch")

    step: Annotated[int, Field(ge=0), INT32]
    """Number of this step in the lineage. A batch whose gradient was not finite has the number of the previous step."""
    experiences: Annotated[int, Field(ge=1), INT32]
    digest: Sha256
    read: tuple[PartitionRead, ...] = Field(default=(), max_length=LISTED_MAX)
    """Records that were read since the previous batch, or, for the first batch of an account, since the previous
    account, in reading order."""
    left_out: tuple[Text, ...] = Field(default=(), max_length=LISTED_MAX)
    """Ids of experiences that were selected for this batch, or since the previous batch, but that the step cannot
    train. They are dropped as `invalid` and are not counted in `experiences`."""


class TrainingMetrics(Event):
    """The outcomes of all experiences between two saves of a lineage, sent once the later save is durable.

    After a crash the trainer repeats work but reports it only once, because `event_id` identifies the save.
    """

    topic: ClassVar[str] = "training-metrics"
    type: ClassVar[str] = "headrace.training-metrics.v1"

    model: ModelName
    lineage: Text
    step: Annotated[int, Field(ge=0), INT32]
    account: Annotated[int, Field(ge=0), INT32] = 0
    """Number of the save in its lineage. A save without a new version, for example with drops alone, has one, too."""
    version: Version | None = None
    metrics: dict[Text, Finite] = Field(default_factory=dict, max_length=256)
    verdicts: tuple[TrainingOutcome, ...] = Field(default=(), max_length=LISTED_MAX)
    stopped: LongText | None = None
    """The reason why training stopped: a health metric stayed outside its limit. An operator has to resume training."""
    undone: tuple[RevertedOutcome, ...] = Field(default=(), max_length=LISTED_MAX)
    """Reverted outcomes, which apply after all `verdicts` of this account and of earlier accounts. Entries that do not
    fit are in the following accounts, before any other outcome of these revisions. The same holds for `restored`."""
    restored: tuple[RestoredOutcome, ...] = Field(default=(), max_length=LISTED_MAX)
    """Restored revisions, which apply after all `verdicts`. No revision is in both `undone` and `restored`."""
    batches: tuple[BatchRecord, ...] = Field(default=(), max_length=LISTED_MAX)
    read: tuple[PartitionRead, ...] = Field(default=(), max_length=LISTED_MAX)
    """Records that were read after the last batch."""

    @property
    def event_id(self) -> str:
        return derived_id("training-metrics", self.lineage, self.account)

    @property
    def key(self) -> str:
        return self.model


class RolloutStep(Model):
    """Step that a decision takes in a rollout.

    For readers without support of rollouts, `decision` is the equivalent: `probed` for an intermediate step,
    `promoted`, `skipped` for a hold (the version serves no traffic but is not refused), `withdrawn` for a rollback (the
    version and its descendants are refused).
    """

    rollout_id: Text
    kind: Literal["begin", "advance", "promote", "hold", "roll_back"]
    stage: Annotated[int, Field(ge=0), INT32]
    """The stage after the step, from 0."""
    share: Share
    """The candidate's share of all units after the step; 1 for a promotion."""
    excludes: bool = False
    """For a rollback: whether the version's answers are excluded from training, and trained ones are reversed. A later
    promotion of the version ends the exclusion."""


class ModelEvent(Event):
    """One decision about a version. `statistics` are the numbers on which it is based."""

    topic: ClassVar[str] = "model-events"
    type: ClassVar[str] = "headrace.model-event.v1"

    decision_id: Text
    model: ModelName
    version: Version
    decision: Decision
    previous: Version | None = None
    """The version that it is compared with or replaces; for `rolled_back` the version that serves again."""
    reason: LongText | None = None
    statistics: dict[Text, Finite] = Field(default_factory=dict, max_length=STATISTICS_MAX)
    who: Text | None = None
    """The operator who requested the decision, or None if the registry decided."""
    rollout: RolloutStep | None = None

    @property
    def event_id(self) -> str:
        return self.decision_id

    @property
    def key(self) -> str:
        return self.model

    @property
    def subject(self) -> str:
        return self.version
