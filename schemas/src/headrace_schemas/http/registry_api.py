"""Requests and responses of the registry's REST API, and of `GET /sources` of scorer and judge, shared by the
services and the SDK.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.events.checkpoint import ModelEvent
from headrace_schemas.values.base import AliasName, LongText, Model, ModelName, Remark, Text, Timestamp, Version
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
