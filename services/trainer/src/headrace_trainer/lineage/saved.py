"""What a lineage's saved state looks like: JSON for all but the tensors, and no pickle anywhere."""

from __future__ import annotations

from typing import Annotated, Literal

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


class Tensors(Model):
    """Weights and optimizer at one moment, as safetensors blobs."""

    weights: BlobRef
    optimizer: BlobRef


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
        pairs = (self.present, *self.restore_points.values())
        return {ref.sha256: ref for pair in pairs for ref in (pair.weights, pair.optimizer)}


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
