"""Rows of the registry's tables as dataclasses."""

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
"""Request of an operator: none, promotion after a passed gate, or promotion without the gate (the probe is always
required)."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """Registered version. `number` is the order of registration, and `changed` the time at which it entered its
    `state`."""

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
    """Whether a trainer of this installation published the version."""
    label: str | None = None
    served: bool = False
    """Whether an operator requested that replicas load the version."""
    retired_at: datetime | None = None
    """Time at which the version was retired, or None."""
    collected: bool = False

    @property
    def retired(self) -> bool:
        return self.retired_at is not None


@dataclass(frozen=True, slots=True)
class AnchorState:
    """Anchor of a model: the version that candidates are compared with in addition to the champion."""

    anchor: str | None = None
    """The last version that was shown to be better than the anchor before it. None means that the champion is the
    anchor."""
    trials: int = 0
    """Number of versions so far that were compared with this anchor."""
    lead: str | None = None
    """The champion's evidence that it is better than the anchor: `trial.SuccessionEvidence` as JSON."""


CHAMPION_IS_ANCHOR = AnchorState()
"""State in which the champion is its own anchor, and no version was compared with it yet."""


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """Row of a model: the versions with roles, pin and pause, and the last published routing."""

    model: str
    champion: str | None
    previous: str | None
    candidate: str | None
    pinned: str | None
    """Version to which the model is pinned; no other version can become champion. None if it is not pinned."""
    paused: bool
    """Whether versions may become candidate or champion only if an operator requests them."""
    revision: int
    routing: str | None
    anchor: str | None
    trials: int
    lead: str | None
    family: int = 0
    """Number of rollouts so far against the champion or versions equal to it."""

    @property
    def anchor_state(self) -> AnchorState:
        return AnchorState(self.anchor, self.trials, self.lead)

    def may_change_roles(self, version: VersionRecord) -> bool:
        """Return whether pin and pause of the model allow `version` to become candidate and champion."""
        if self.pinned is not None:
            return version.version == self.pinned and bool(version.request)
        return not self.paused or bool(version.request)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a candidate's trial: the opponents, whether it passed, and the anchor after the trial."""

    champion: str | None
    anchor: str | None
    passed: bool
    reason: str
    statistics: Mapping[str, float]
    anchor_state: AnchorState


@dataclass(frozen=True, slots=True)
class ModelView:
    """Data of a model from the database, by which its next action is chosen."""

    model: ModelRecord
    versions: Mapping[str, VersionRecord]
    """Versions by name: those with a role, those that wait, and the bases of both."""
    waiting: tuple[VersionRecord, ...]
    """Versions in state `registered`, in the order of registration."""
    trial_result: TrialResult | None
    """Result of the candidate's trial by the present gate program, or None."""
    audited: frozenset[str]
    """Those of champion, previous and candidate that have a score on the audit tasks of the present gate program."""
    under_way: int = 0
    """Number of rollouts in progress."""
    slots: int | None = None
    """Maximum number of concurrent rollouts while the present ones are in progress; None if there are none."""
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
