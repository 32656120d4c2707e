"""A trainer's saved state, by the trainer's own classes."""

from __future__ import annotations

from headrace_schemas import Checkpoint, TrainingMetrics
from headrace_schemas.values.blobs import BlobRef
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.experiences.history import PublishedVersion
from headrace_trainer.lineage.saved import Saved, Tensors
from tests.unit.registry.rig import START

_BLOB = BlobRef(uri="none", sha256="0" * 64, size=0)


def saved(lineage: str, *versions: str) -> Saved:
    """Save a lineage from its base to its head. The trainer can go back to the base and to the last promoted
    version."""
    published = [
        PublishedVersion(version=version, parent=versions[n - 1] if n else None, number=n, manifest=_BLOB)
        for n, version in enumerate(versions)
    ]
    tensors = Tensors(weights=_BLOB, optimizer=_BLOB)
    first, head = versions[0], versions[-1]
    middle = versions[1:-1] if len(versions) == 3 else ()
    return Saved(
        model="m",
        lineage=lineage,
        kind="full",
        offsets={},
        waiting=(),
        window={},
        versions=tuple(published),
        head=head,
        head_step=0,
        promoted=(first,),
        baselines=Baselines(),
        steps=0,
        account=0,
        present=tensors,
        restore_points=dict.fromkeys((first, *middle, head), tensors),
        checkpoint=Checkpoint(time=START, model="m", version=head, lineage=lineage, step=0, manifest=_BLOB),
        metrics=TrainingMetrics(time=START, model="m", lineage=lineage, step=0, account=0),
    )
