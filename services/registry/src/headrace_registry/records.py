"""Rows of the tables as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from headrace_schemas.blobs import BlobRef

State = Literal["registered", "probing", "evaluating", "canary", "promoted", "held", "rejected", "skipped", "withdrawn"]
"""registered → probing → evaluating → (canary →) promoted, or rejected; held when its rollout ended without a verdict;
skipped when a newer version came; withdrawn when it, or a version that it descends from, was withdrawn."""

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
    rollout: str | None = None
    """The kind and share that an operator asked for, as `rollouts.wish.Wish` writes it."""
    trained: bool = True
    """By a trainer of ours."""
    label: str | None = None
    served: bool = False
    """Somebody asked for it to be held ready."""
    retired_at: datetime | None = None
    """Since when it never serves again."""
    collected: bool = False

    @property
    def retired(self) -> bool:
        return self.retired_at is not None


@dataclass(frozen=True, slots=True)
class Standing:
    """The anchor of a model: a version that candidates are compared with besides the champion. None: the champion."""

    anchor: str | None = None
    """The best version so far: the last one that was shown to be better than the anchor before it."""
    trials: int = 0
    """How many versions were compared with this anchor: the size of the family so far."""
    lead: str | None = None
    """The champion's evidence that it is better than the anchor, as `trial.Lead` writes it."""


ALONE = Standing()
"""The champion is its own anchor, and no version was compared with it yet."""


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The roles of versions, pin and pause, and the revision of the last published routing."""

    model: str
    champion: str | None
    previous: str | None
    candidate: str | None
    pinned: str | None
    """The one version that may be champion until it is unpinned."""
    paused: bool
    """Only versions that an operator asks for move."""
    revision: int
    routing: str | None
    anchor: str | None
    trials: int
    lead: str | None
    family: int = 0
    """How many rollouts there were against the champion or its equals."""

    @property
    def standing(self) -> Standing:
        return Standing(self.anchor, self.trials, self.lead)

    def may_move(self, version: VersionRecord) -> bool:
        """Whether pin and pause allow that `version` becomes candidate and champion."""
        if self.pinned is not None:
            return version.version == self.pinned and bool(version.request)
        return not self.paused or bool(version.request)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial: the opponents, whether the candidate passed, and the anchor from now on."""

    champion: str | None
    anchor: str | None
    passed: bool
    reason: str
    statistics: Mapping[str, float]
    standing: Standing


@dataclass(frozen=True, slots=True)
class ModelView:
    """What the next decision about a model needs from the database."""

    model: ModelRecord
    versions: Mapping[str, VersionRecord]
    """Those with a role, those that wait, and the bases of either; by name."""
    waiting: tuple[VersionRecord, ...]
    """In state `registered`, in the order of arrival."""
    trial_result: TrialResult | None
    """What the present gate found of the candidate."""
    audited: frozenset[str]
    """Those of champion, previous and candidate whose score the present gate has measured on the audit tasks."""
    under_way: int = 0
    """Rollouts that are going on."""
    slots: int | None = None
    """How many there may be at a time while these go on; None: none goes on."""
    begun_lately: int = 0
    """Rollouts that began within the last hour."""

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
