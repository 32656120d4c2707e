"""Requests and answers of the registry about rollouts. The service and the SDK share these models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.base import Finite, Model, ModelName, Remark, Share, Text, Timestamp, Version
from headrace_schemas.events.model_event import ModelEvent

RolloutKind = Literal["rolling", "canary", "ab"]


class ChartPoint(Model):
    """What the sessions had shown at one moment."""

    units: Annotated[float, Field(ge=0)]
    """Mature ones of the candidate."""
    metrics: dict[Text, tuple[Finite, Finite, Finite]] = Field(default_factory=dict)
    """Candidate less champion in the metric's own unit, and the ends of its confidence sequence."""


class ShadowState(Model):
    """What the shadow of a rollout has found, once it is over."""

    prompts: Annotated[int, Field(ge=0)]
    """Taken from users' sessions."""
    read: Annotated[int, Field(ge=0)]
    """Answered by both versions, and judged or not by the time they were read."""
    pairs: Annotated[int, Field(ge=0)]
    """Of those, with two whole answers that both were judged."""
    spoke: Annotated[int, Field(ge=0)]
    """Of those, with a user who said something, and a weight."""
    ended: dict[str, int] = Field(default_factory=dict)
    """How often a new answer ended otherwise than with an answer, by side and reason."""
    left_out: dict[str, int] = Field(default_factory=dict)
    """Prompts that nobody could answer, by reason."""
    tokens: Annotated[int, Field(ge=0)]
    judged: Finite | None = None
    """Candidate less champion as the judges see it."""
    effective: Finite
    """As how many answers those of the champion count for the candidate."""
    mean_weight: Finite
    """1 where the versions overlap."""
    difference: Finite | None = None
    """In what users would say, from 0 to 1; None where it was refused."""
    lower: Finite | None = None
    upper: Finite | None = None
    refused: str | None = None
    """Why nothing is said about users."""


class RolloutState(Model):
    """A rollout: `phase` is `shadow` or `canary` while it goes on, else how it ended."""

    id: Text
    object: Literal["rollout"] = "rollout"
    model: ModelName
    version: Version
    control: Version
    """The champion that it is compared with."""
    kind: Text
    phase: Literal["shadow", "canary", "champion", "succeeded", "hold", "rolled_back"]
    stage: Annotated[int, Field(ge=0)]
    stages: tuple[Share, ...]
    share: Share
    """Of all units, for the candidate, now; as much for its control."""
    unit: Literal["session", "user"]
    number: Annotated[int, Field(ge=1)]
    """Its place in the family of versions that are compared with one champion or its equals."""
    reason: str
    """Of its last step."""
    good_enough: bool = False
    """Its sessions have shown what a promotion asks for, whether the plan promotes by itself or not."""
    margins: dict[Text, Finite]
    """What each guardrail may lose, declared before the first session."""
    higher_is_better: dict[Text, bool]
    statistics: dict[Text, Finite]
    shadow_units: Annotated[int, Field(ge=0)] = 0
    """How many prompts its shadow answers; 0: it has none."""
    shadow: ShadowState | None = None
    chart: tuple[ChartPoint, ...] = ()
    began_at: Timestamp
    changed_at: Timestamp
    watched_s: Annotated[Finite, Field(ge=0)]
    """For how long its sessions were watched; ages and time limits are of this time."""
    decisions: tuple[ModelEvent, ...] = ()


class RolloutList(Model):
    """`GET /v1/rollouts`, the newest first, without charts and decisions."""

    object: Literal["list"] = "list"
    data: tuple[RolloutState, ...]


class RolloutRequest(Model):
    """`POST /v1/models/{name}/rollouts`: the version goes through the gate and then gets a share of the traffic,
    whatever `registry.rollout.kind` says."""

    version: Version
    kind: RolloutKind = "canary"
    share: Share | None = None
    """One fixed share, in place of the stages of `registry.rollout`."""
    reason: Remark = ""


class RolloutChange(Model):
    """`POST /v1/rollouts/{id}/stop`, `.../promote`, `.../rollback`; an empty body does."""

    reason: Remark = ""
