"""The saved state of a lineage: JSON for all but the tensors, and no pickle."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from headrace_schemas import Checkpoint, TrainingMetrics, TrainingOutcome
from headrace_schemas.values.base import Model, ModelName, Sha256, Text, Version
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.bounds import STORED
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.experiences.history import PublishedVersion
from headrace_trainer.experiences.reports import Offsets, UnreportedOutcomes
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.experiences.window import Entry
from headrace_trainer.lineage.health import Health

_BOUNDS = frozenset({"bound", "greater_than_equal", "too_short"})
"""Types of pydantic errors for values that earlier releases accepted; `too_short` follows a refused list item."""
_DETAIL_LENGTH_MAX = 200


class Range(NamedTuple):
    """A range of bytes in one of several files."""

    source: int
    """0 for the frame of an `Assembly`, n for its n-th file."""
    start: int
    size: int


class Assembly(Model):
    """Description of a weights file as a sequence of byte ranges of stored blobs, from which it is assembled."""

    frame: BlobRef
    """The bytes that only this file has."""
    files: tuple[BlobRef, ...]
    """Files of a version, which are shared blobs of the store."""
    ranges: tuple[Range, ...]


class Tensors(Model):
    """References to the weights and the optimizer state after one step, stored as safetensors blobs."""

    weights: BlobRef
    optimizer: BlobRef
    assembly: Assembly | None = None
    """How `weights` is assembled, or None where it is stored as one blob."""

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """The blobs that must be kept for this saved state, in addition to those of versions."""
        return (self.assembly.frame if self.assembly else self.weights), self.optimizer


class SavedState(Model):
    """Saved state of a lineage between two steps.

    `headrace_trainer.experiences.state` describes the fields and why they are saved together.
    """

    format: Literal[1] = 1
    model: ModelName
    lineage: ModelName
    kind: Literal["full", "lora"]
    offsets: Offsets
    waiting: tuple[WaitingExperience, ...]
    window: dict[str, Entry]
    versions: Annotated[tuple[PublishedVersion, ...], Field(min_length=1)]
    """The first version is the base of the lineage."""
    head: Version
    head_step: int
    promoted: Annotated[tuple[Version, ...], Field(min_length=1, max_length=2)]
    excluded: tuple[Version, ...] = ()
    """Versions whose experiences are not trained."""
    baselines: Baselines
    steps: Annotated[int, Field(ge=0)]
    left_out: tuple[Text, ...] = ()
    """See `LineageState.left_out`."""
    unreported: UnreportedOutcomes = UnreportedOutcomes()
    account: Annotated[int, Field(ge=0)]
    health: Health = Health()
    present: Tensors
    restore_points: dict[str, Tensors]
    checkpoint: Checkpoint
    """Announcement of the last version, sent once more after a restart."""
    metrics: TrainingMetrics
    """Outcomes since the save before this one, announced once more after a restart."""
    refused: Annotated[tuple[TrainingOutcome, ...], Field(exclude=True)] = ()
    """Outcomes of the experiences that `read_saved` left out of `waiting`. They are not part of the stored JSON."""

    @property
    def differs_from_head(self) -> bool:
        """Whether steps have changed the weights since the version `head`."""
        point = self.restore_points.get(self.head)
        return point is None or point.weights.sha256 != self.present.weights.sha256

    def blobs(self) -> dict[str, BlobRef]:
        """Return by digest the blobs that this state refers to, which must exist as long as it is the lineage's
        state."""
        points = (self.present, *self.restore_points.values())
        return {ref.sha256: ref for point in points for ref in point.blobs}


def read_saved(data: bytes) -> SavedState:
    """Parse a state that this release or an earlier one saved.

    An earlier release may have stored text and numbers that no event may contain today. Such text is cleaned. A waiting
    experience with such a number is left out and gets an outcome in `SavedState.refused`; the others stay.

    Raises:
        ValidationError: the state has another error.
    """
    try:
        return SavedState.model_validate_json(data, context={STORED: True})
    except ValidationError as error:
        problems = _waiting_beyond_bounds(error)
        if not problems:
            raise
    fields = json.loads(data)
    outcomes = tuple(
        _refusal_outcome(fields["waiting"][index]["experience"], detail) for index, detail in problems.items()
    )
    fields["waiting"] = [item for index, item in enumerate(fields["waiting"]) if index not in problems]
    saved = SavedState.model_validate_json(json.dumps(fields), context={STORED: True})
    return saved.model_copy(update={"refused": outcomes})


def _waiting_beyond_bounds(error: ValidationError) -> dict[int, str]:
    """Return by index the waiting experiences of a saved state that exceed a bound of this release, with the problem.

    The result is empty if the validation error of the state has any other cause.
    """
    problems: dict[int, str] = {}
    for problem in error.errors(include_input=False, include_url=False):
        match problem["loc"]:
            case ("waiting", int(place), "experience", *path) if problem["type"] in _BOUNDS:
                problems.setdefault(place, f"{'.'.join(map(str, path))}: {problem['msg']}"[:_DETAIL_LENGTH_MAX])
            case _:
                return {}
    return problems


def _refusal_outcome(experience: dict[str, Any], detail: str) -> TrainingOutcome:
    fields = {name: experience[name] for name in ("experience_id", "revision", "turn_ids")}
    return TrainingOutcome.model_validate(fields | {"dropped": "invalid", "detail": detail}, context={STORED: True})


class Pointer(Model):
    """Record that names the current saved state of a lineage and the process that owns it. It is replaced
    atomically."""

    format: Literal[2] = 2
    epoch: Annotated[int, Field(ge=0)]
    """Number of owners so far. Each owner writes its blobs into an area of its own."""
    owner: str
    """See `headrace_runtime.process.liveness`."""
    state: BlobRef | None
    """None while the first owner has not saved yet."""
    epochs: dict[Sha256, int]
    """Epoch whose area holds each blob of the state, by digest."""


class LegacyPointer(Model):
    """The pointer of earlier releases, without an owner: all blobs are shared ones."""

    format: Literal[1] = 1
    state: BlobRef
