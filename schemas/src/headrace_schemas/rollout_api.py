"""Requests and answers of the registry about rollouts. The service and the SDK share these models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.base import Finite, Model, ModelName, Share, Text, Timestamp, Version
from headrace_schemas.events.model_event import ModelEvent

RolloutKind = Literal["rolling", "canary", "ab"]


class ChartPoint(Model):
    """What the sessions had shown at one moment."""

    units: Annotated[float, Field(ge=0)]
    """Mature ones of the candidate."""
    metrics: dict[Text, tuple[Finite, Finite, Finite]] = Field(default_factory=dict)
    """Candidate less champion in the metric's own unit, and the ends of its confidence sequence."""


class RolloutState(Model):
    """A rollout: `phase` is `canary` while it goes on, else how it ended."""

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
    reason: Annotated[str, Field(max_length=4096)] = ""


class RolloutChange(Model):
    """`POST /v1/rollouts/{id}/stop`, `.../promote`, `.../rollback`; an empty body does."""

    reason: Annotated[str, Field(max_length=4096)] = ""
