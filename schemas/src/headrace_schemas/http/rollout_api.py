"""Requests and responses of the registry about rollouts, shared by the service and the SDK."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.events.checkpoint import ModelEvent
from headrace_schemas.values.base import Finite, Model, ModelName, Remark, Share, Text, Timestamp, Version

RolloutKind = Literal["rolling", "canary", "ab"]


class ChartPoint(Model):
    """The evidence of a rollout at one moment."""

    units: Annotated[float, Field(ge=0)]
    """Number of mature units of the candidate."""
    metrics: dict[Text, tuple[Finite, Finite, Finite]] = Field(default_factory=dict)
    """Candidate minus champion in the metric's own unit, and the bounds of its confidence sequence."""


class ShadowState(Model):
    """Result of the shadow phase of a rollout, available once the phase is over."""

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
    """Its number in the family of versions that are compared with one champion or with its equals."""
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
