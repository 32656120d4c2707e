"""Rows of the tables as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from headrace_schemas.values.blobs import BlobRef

State = Literal["registered", "probing", "evaluating", "canary", "promoted", "held", "rejected", "skipped", "withdrawn"]
"""registered → probing → evaluating → (canary →) promoted, or rejected; held when its rollout ended without a verdict;
skipped when a newer version arrived; withdrawn when it, or a version that it descends from, was withdrawn."""

Request = Literal["", "gate", "force"]
"""Request of an operator: none, promotion through the gate, or promotion past the gate (never past the probe)."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One registered version. `number` is the order of arrival, `changed` the time when it entered its `state`."""

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
    rollout: str | None = None
    """Kind and share that an operator requested, as `rollouts.settings.RequestedRollout` in JSON."""
    trained: bool = True
    """Whether a trainer of this installation made it."""
    label: str | None = None
    served: bool = False
    """Whether an operator requested that replicas load it."""
    retired_at: datetime | None = None
    """When it was retired, or None."""
    collected: bool = False

    @property
    def retired(self) -> bool:
        return self.retired_at is not None


@dataclass(frozen=True, slots=True)
class AnchorState:
    """Anchor of a model: the version that candidates are compared with besides the champion.

    None: the champion itself.
    """

    anchor: str | None = None
    """The last version that was shown to be better than the anchor before it."""
    trials: int = 0
    """Number of versions that were compared with this anchor: the size of the family so far."""
    lead: str | None = None
    """The champion's evidence that it is better than the anchor: `trial.SuccessionEvidence` as JSON."""


CHAMPION_IS_ANCHOR = AnchorState()
"""The champion is its own anchor, and no version was compared with it yet."""


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """Roles of the versions of a model, its pin and pause, and the revision of the last published routing."""

    model: str
    champion: str | None
    previous: str | None
    candidate: str | None
    pinned: str | None
    """The one version that may be champion until it is unpinned."""
    paused: bool
    """Whether only versions that an operator requests may change roles."""
    revision: int
    routing: str | None
    anchor: str | None
    trials: int
    lead: str | None
    family: int = 0
    """Number of rollouts against the champion or its equals."""

    @property
    def anchor_state(self) -> AnchorState:
        return AnchorState(self.anchor, self.trials, self.lead)

    def may_change_roles(self, version: VersionRecord) -> bool:
        """Return whether pin and pause allow `version` to become candidate and champion."""
        if self.pinned is not None:
            return version.version == self.pinned and bool(version.request)
        return not self.paused or bool(version.request)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a candidate's trial: the opponents, whether it passed, and the resulting anchor (the version that
    candidates must not fall behind).
    """

    champion: str | None
    anchor: str | None
    passed: bool
    reason: str
    statistics: Mapping[str, float]
    anchor_state: AnchorState


@dataclass(frozen=True, slots=True)
class ModelView:
    """Data from the database by which the next action for a model is chosen."""

    model: ModelRecord
    versions: Mapping[str, VersionRecord]
    """By name: versions with a role, waiting versions, and the bases of both."""
    waiting: tuple[VersionRecord, ...]
    """Versions in state `registered`, in the order of arrival."""
    trial_result: TrialResult | None
    """Result of the candidate's trial by the present gate."""
    audited: frozenset[str]
    """Versions among champion, previous and candidate with a score on the audit tasks of the present gate."""
    under_way: int = 0
    """Number of rollouts under way."""
    slots: int | None = None
    """Number of rollouts that may be under way together while the present ones last, or None without any."""
    rollouts_last_hour: int = 0
    """Number of rollouts that began within the last hour."""

    @property
    def champion(self) -> VersionRecord | None:
        return self.versions.get(self.model.champion or "")

    @property
    def previous(self) -> VersionRecord | None:
        return self.versions.get(self.model.previous or "")

    @property
    def candidate(self) -> VersionRecord | None:
        return self.versions.get(self.model.candidate or "")

    @property
    def anchor(self) -> VersionRecord | None:
        return self.versions.get(self.model.anchor or "")
