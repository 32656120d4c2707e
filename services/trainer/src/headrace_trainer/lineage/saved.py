"""What a lineage's saved state looks like: JSON for all but the tensors, and no pickle anywhere."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from headrace_schemas import Checkpoint, TrainingMetrics
from headrace_schemas.base import Model, ModelName, Sha256, Version
from headrace_schemas.blobs import BlobRef
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.experiences.history import Published
from headrace_trainer.experiences.state import Offsets
from headrace_trainer.experiences.waiting import Waiting
from headrace_trainer.experiences.window import Entry
from headrace_trainer.lineage.health import Health


class Range(NamedTuple):
    """Bytes of one of several files."""

    source: int
    """0 for the frame of an `Assembly`, n for its n-th file."""
    start: int
    size: int


class Assembly(Model):
    """A file as ranges of blobs that are stored anyway; see `headrace_trainer.lineage.assembly`."""

    frame: BlobRef
    """The bytes that only this file has."""
    files: tuple[BlobRef, ...]
    """Files of a version, which lie among the blobs of all."""
    ranges: tuple[Range, ...]


class Tensors(Model):
    """Weights and optimizer at one moment, as safetensors blobs."""

    weights: BlobRef
    optimizer: BlobRef
    assembly: Assembly | None = None
    """How `weights` is put together; None where it is stored as it is."""

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """What is stored of it besides versions."""
        return (self.assembly.frame if self.assembly else self.weights), self.optimizer


class Saved(Model):
    """A lineage between two steps. See `headrace_trainer.experiences.state` for what the fields mean and why they
    belong together."""

    format: Literal[1] = 1
    model: ModelName
    lineage: ModelName
    kind: Literal["full", "lora"]
    offsets: Offsets
    waiting: tuple[Waiting, ...]
    window: dict[str, Entry]
    versions: Annotated[tuple[Published, ...], Field(min_length=1)]
    """The first is the base that everything started from."""
    head: Version
    head_step: int
    promoted: Annotated[tuple[Version, ...], Field(min_length=1, max_length=2)]
    excluded: tuple[Version, ...] = ()
    """Versions whose experiences are not trained."""
    baselines: Baselines
    steps: Annotated[int, Field(ge=0)]
    account: Annotated[int, Field(ge=0)]
    health: Health = Health()
    present: Tensors
    restore_points: dict[str, Tensors]
    checkpoint: Checkpoint
    """The last version, announced again after a restart."""
    metrics: TrainingMetrics
    """The outcomes since the save before this one, announced again after a restart."""

    def blobs(self) -> dict[str, BlobRef]:
        """The tensors that must exist as long as this is the lineage's state, by digest."""
        points = (self.present, *self.restore_points.values())
        return {ref.sha256: ref for point in points for ref in point.blobs}


class Pointer(Model):
    """The one thing that is replaced: what it names is the truth about the lineage, and whose it is."""

    format: Literal[2] = 2
    epoch: Annotated[int, Field(ge=0)]
    """Counts owners. Each writes its blobs in an area of its own."""
    owner: str
    """See `headrace_runtime.holders`."""
    state: BlobRef | None
    """None while the first owner has not saved yet."""
    epochs: dict[Sha256, int]
    """In whose area each blob of the state lies, by digest."""


class ShortPointer(Model):
    """The same as earlier releases wrote it: no owner, and all blobs among those of everybody."""

    format: Literal[1] = 1
    state: BlobRef
