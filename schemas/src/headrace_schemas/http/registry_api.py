"""Requests and responses of the registry about models and rollouts, and of `GET /sources` of scorer and judge."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.events.checkpoint import ModelEvent
from headrace_schemas.values.base import (
    AliasName,
    Finite,
    LongText,
    Model,
    ModelName,
    Remark,
    Share,
    Text,
    Timestamp,
    Version,
)
from headrace_schemas.values.blobs import BlobRef

Count = Annotated[int, Field(ge=0)]


class ModelState(Model):
    """A model and the roles of its versions.

    `revision` is that of its routing, -1 before the first one. `anchor` is the best version in the trials so far, and
    `trials` counts the versions that were compared with it.
    """

    id: ModelName
    object: Literal["model"] = "model"
    champion: Version | None = None
    previous: Version | None = None
    candidate: Version | None = None
    pinned: Version | None = None
    paused: bool = False
    anchor: Version | None = None
    trials: Annotated[int, Field(ge=0)] = 0
    aliases: dict[AliasName, Version] = Field(default_factory=dict)
    """The aliases that operators set."""
    revision: int
    trouble: Annotated[str, Field(max_length=4096)] | None = None
    """The error of a replica that refuses the model, or None while a replica serves the model."""


class ModelList(Model):
    """Response of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: tuple[ModelState, ...]


class VersionState(Model):
    """A version with all decisions about it, the oldest first."""

    id: Version
    object: Literal["model.version"] = "model.version"
    model: ModelName
    lineage: Text
    step: Annotated[int, Field(ge=0)]
    parent: Version | None = None
    base: Version | None = None
    state: Literal[
        "registered", "probing", "evaluating", "canary", "promoted", "held", "rejected", "skipped", "withdrawn"
    ]
    registered_at: Timestamp
    trained: bool = True
    """Whether a Headrace trainer produced it. The answers of other versions are captured but never trained."""
    label: AliasName | None = None
    served: bool = False
    """Whether replicas keep it loaded on an operator's request, independent of its roles."""
    retired: bool = False
    """Whether it is retired. A retired version never serves again, and its files may be removed."""
    collected: bool = False
    """Whether its files were removed."""
    tags: tuple[AliasName, ...] = ()
    manifest: BlobRef | None = None
    decisions: tuple[ModelEvent, ...] = ()


class VersionList(Model):
    """Response of `GET /v1/models/{name}/versions`: the newest first."""

    object: Literal["list"] = "list"
    data: tuple[VersionState, ...]


class PromoteRequest(Model):
    """Request of `POST /v1/models/{name}/promote`.

    `force` skips the gate but never the probe, and it reverts a withdrawal.
    """

    version: Version
    force: bool = False


class AuditedPromoteRequest(PromoteRequest):
    """A `PromoteRequest` with a reason for the audit log.

    The client sends none, so that older registries accept its requests.
    """

    reason: Remark = ""


class WithdrawRequest(Model):
    """Request of `POST /v1/models/{name}/withdraw`."""

    version: Version
    reason: Remark = ""


class PinRequest(Model):
    """Request of `POST /v1/models/{name}/pin`.

    Without a version the champion is pinned. Another version skips the gate, becomes champion as soon as replicas have
    probed it, and is pinned then.
    """

    version: Version | None = None
    reason: Remark = ""


class HoldRequest(Model):
    """Request of `POST /v1/models/{name}/unpin`, `.../pause`, `.../resume` and `.../stop`. The body may be empty."""

    reason: Remark = ""


class RollbackRequest(Model):
    """Request of `POST /v1/models/{name}/rollback`. The body may be empty."""

    reason: Remark = ""


class SourceState(Model):
    """The state of one reward function or rubric since its process started."""

    id: Text
    object: Literal["source"] = "source"
    outcomes: dict[Text, Count] = Field(default_factory=dict)
    """Number of results by outcome. `retried` counts failures of the endpoint after which the work is repeated."""
    failing: Count = 0
    """Number of consecutive failures; 0 after a score or an abstention."""
    last_error: LongText | None = None
    last_error_at: Timestamp | None = None


class SourceList(Model):
    """Response of `GET /sources`."""

    object: Literal["list"] = "list"
    data: tuple[SourceState, ...]


RolloutKind = Literal["rolling", "canary", "ab"]


class ChartPoint(Model):
    """Point of a rollout's chart: the difference between candidate and champion in each metric, after a number of
    observed users or sessions.
    """

    units: Annotated[float, Field(ge=0)]
    """Number of mature units of the candidate."""
    metrics: dict[Text, tuple[Finite, Finite, Finite]] = Field(default_factory=dict)
    """Candidate minus champion in the metric's own unit, and the bounds of its confidence sequence."""


class ShadowState(Model):
    """Result of a rollout's shadow phase, in which the candidate answered users' prompts and no user saw the answers.

    It is available once the phase is over.
    """

    prompts: Annotated[int, Field(ge=0)]
    """Number of prompts that were taken from users' sessions."""
    read: Annotated[int, Field(ge=0)]
    """Number of prompts that both versions answered, whether the answers were judged in time or not."""
    pairs: Annotated[int, Field(ge=0)]
    """Number of `read` prompts with two complete answers that were both judged."""
    spoke: Annotated[int, Field(ge=0)]
    """Number of `pairs` with feedback from the user and an importance weight."""
    ended: dict[str, int] = Field(default_factory=dict)
    """Number of new answers that ended without a complete answer, by side and reason."""
    left_out: dict[str, int] = Field(default_factory=dict)
    """Number of prompts that no version could answer, by reason."""
    tokens: Annotated[int, Field(ge=0)]
    judged: Finite | None = None
    """Candidate minus champion in the scores of the judges."""
    effective: Finite
    """Effective sample size of the champion's answers for estimates about the candidate."""
    mean_weight: Finite
    """Mean importance weight. It is 1 if the versions overlap."""
    difference: Finite | None = None
    """Estimated candidate minus champion in users' feedback on a scale from 0 to 1, or None if it was not estimated."""
    lower: Finite | None = None
    upper: Finite | None = None
    refused: str | None = None
    """The reason why users' feedback was not estimated."""


class RolloutState(Model):
    """A rollout. `phase` is `shadow` or `canary` while it is in progress, and its result afterwards."""

    id: Text
    object: Literal["rollout"] = "rollout"
    model: ModelName
    version: Version
    control: Version
    """The champion with which the candidate is compared."""
    kind: Text
    phase: Literal["shadow", "canary", "champion", "succeeded", "hold", "rolled_back"]
    stage: Annotated[int, Field(ge=0)]
    stages: tuple[Share, ...]
    share: Share
    """The candidate's present share of all units. Its control has an equal share."""
    unit: Literal["session", "user"]
    number: Annotated[int, Field(ge=1)]
    """Number of this rollout, from 1, among all rollouts against the same champion or a version equal to it."""
    reason: str
    """The reason of its last step."""
    good_enough: bool = False
    """Whether the evidence suffices for a promotion, even if the plan does not promote automatically."""
    margins: dict[Text, Finite]
    """The largest accepted loss of each guardrail, declared before the first session."""
    higher_is_better: dict[Text, bool]
    statistics: dict[Text, Finite]
    shadow_units: Annotated[int, Field(ge=0)] = 0
    """Number of prompts in its shadow phase; 0 without a shadow phase."""
    shadow: ShadowState | None = None
    chart: tuple[ChartPoint, ...] = ()
    began_at: Timestamp
    changed_at: Timestamp
    watched_s: Annotated[Finite, Field(ge=0)]
    """Seconds for which its sessions were observed. Ages and time limits refer to this time."""
    decisions: tuple[ModelEvent, ...] = ()


class RolloutList(Model):
    """Response of `GET /v1/rollouts`: the newest first, without charts and decisions."""

    object: Literal["list"] = "list"
    data: tuple[RolloutState, ...]


class RolloutRequest(Model):
    """Request of `POST /v1/models/{name}/rollouts`.

    The version has to pass the gate and then gets a share of the traffic, whatever the value of
    `registry.rollout.kind`.
    """

    version: Version
    kind: RolloutKind = "canary"
    share: Share | None = None
    """A fixed share in place of the stages of `registry.rollout`."""
    reason: Remark = ""


class RolloutChange(Model):
    """Request of `POST /v1/rollouts/{id}/stop`, `.../promote` and `.../rollback`. The body may be empty."""

    reason: Remark = ""
