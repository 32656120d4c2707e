"""What the tables hold, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from headrace_schemas.blobs import BlobRef

State = Literal["registered", "probing", "evaluating", "promoted", "rejected", "skipped", "withdrawn"]
"""registered → probing → evaluating → promoted or rejected; skipped when a newer one came; withdrawn when it was taken
back, or a version that it descends from."""

Request = Literal["", "gate", "force"]
"""What an operator asked for: nothing, promotion through the gate, promotion past the gate (never past the probe)."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One registered version. `number` is the order of arrival, `changed` when it came into its `state`."""

    number: int
    version: str
    model: str
    lineage: str
    step: int
    parent: str | None
    base: str | None
    manifest: BlobRef
    tokenizer_sha256: str
    template_sha256: str
    state: State
    request: Request
    replaced: str | None
    registered: datetime
    changed: datetime


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """Who has which role, what holds the model still, and the revision of the last published routing."""

    model: str
    champion: str | None
    previous: str | None
    candidate: str | None
    pinned: str | None
    """The one version that may be champion until it is unpinned."""
    paused: bool
    """Nothing moves but what an operator asks for."""
    revision: int
    routing: str | None

    def may_move(self, version: VersionRecord) -> bool:
        """Whether `version` may become candidate and champion, as far as pins and pauses go."""
        if self.pinned is not None:
            return version.version == self.pinned and bool(version.request)
        return not self.paused or bool(version.request)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one gate measured of one version: task to mean score."""

    scores: Mapping[str, float]
    at: datetime


@dataclass(frozen=True, slots=True)
class View:
    """Everything in the database that the next decision about a model depends on."""

    model: ModelRecord
    versions: Mapping[str, VersionRecord]
    """Those with a role, those that wait, and the bases of either; by name."""
    waiting: tuple[VersionRecord, ...]
    """In state `registered`, in the order of arrival."""
    evaluations: Mapping[str, Evaluation]
    """By version, of the present gate only."""

    @property
    def champion(self) -> VersionRecord | None:
        return self.versions.get(self.model.champion or "")

    @property
    def previous(self) -> VersionRecord | None:
        return self.versions.get(self.model.previous or "")

    @property
    def candidate(self) -> VersionRecord | None:
        return self.versions.get(self.model.candidate or "")
