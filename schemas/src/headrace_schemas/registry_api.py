"""Requests and answers of the registry's REST interface. The service and the SDK share these models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.base import AliasName, Model, ModelName, Remark, Text, Timestamp, Version
from headrace_schemas.blobs import BlobRef
from headrace_schemas.events.model_event import ModelEvent


class ModelState(Model):
    """A model and the roles of its versions. `revision` is that of its routing, -1 before the first one.

    `anchor` is the best version so far, as far as trials have shown; `trials` counts the versions that were compared
    with it.
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
    """Those that operators set."""
    revision: int
    trouble: Annotated[str, Field(max_length=4096)] | None = None
    """Why no replica serves the model, in the words of the replica that refuses; None while some replica serves it."""


class ModelList(Model):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: tuple[ModelState, ...]


class VersionState(Model):
    """A version and everything that was decided about it, the oldest decision first."""

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
    """Whether a trainer of ours made it. What others answer is captured and never trained."""
    label: AliasName | None = None
    served: bool = False
    """Held ready because somebody asked for it, besides the roles."""
    retired: bool = False
    """It never serves again, and its files may be collected."""
    collected: bool = False
    """Its files are gone."""
    tags: tuple[AliasName, ...] = ()
    manifest: BlobRef | None = None
    decisions: tuple[ModelEvent, ...] = ()


class VersionList(Model):
    """`GET /v1/models/{name}/versions`, the newest first."""

    object: Literal["list"] = "list"
    data: tuple[VersionState, ...]


class PromoteRequest(Model):
    """`POST /v1/models/{name}/promote`. `force` skips the gate, never the probe, and takes a withdrawal back."""

    version: Version
    force: bool = False


class WithdrawRequest(Model):
    """`POST /v1/models/{name}/withdraw`."""

    version: Version
    reason: Remark = ""


class PinRequest(Model):
    """`POST /v1/models/{name}/pin`. Without a version the champion stays champion. Another version becomes champion as
    soon as replicas have probed it, past the gate, and then stays.
    """

    version: Version | None = None
    reason: Remark = ""


class HoldRequest(Model):
    """`POST /v1/models/{name}/unpin`, `.../pause`, `.../resume` and `.../stop`; an empty body does."""

    reason: Remark = ""


class RollbackRequest(Model):
    """`POST /v1/models/{name}/rollback`; an empty body does."""

    reason: Remark = ""
