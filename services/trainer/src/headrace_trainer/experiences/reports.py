"""Reports of a save: the published part of the lineage's state, and the outcomes that wait for the next one."""

from __future__ import annotations

from typing import NamedTuple

from headrace_schemas import BatchRecord, Experience, Read, Restored, TrainingOutcome, Undone
from headrace_schemas.events.checkpoint import DropReason
from headrace_schemas.values.base import Model

Offsets = dict[str, dict[int, int]]
"""Topic to partition to the offset of the next record to read."""


class SaveReport(NamedTuple):
    """The part of a save that is published: outcomes, reversals and batches since the previous save."""

    outcomes: tuple[TrainingOutcome, ...] = ()
    undone: tuple[Undone, ...] = ()
    restored: tuple[Restored, ...] = ()
    batches: tuple[BatchRecord, ...] = ()
    read: tuple[Read, ...] = ()


class Unreported(Model):
    """Outcomes that the next report must contain, because the last one was full."""

    outcomes: tuple[TrainingOutcome, ...] = ()
    undone: tuple[Undone, ...] = ()
    restored: tuple[Restored, ...] = ()


def training_outcome(
    experience: Experience, dropped: DropReason | None, detail: str | None, left_out: tuple[str, ...]
) -> TrainingOutcome:
    """Return the outcome of a revision. `left_out` are its turns whose answers lack logprobs that training needs."""
    return TrainingOutcome(
        experience_id=experience.experience_id,
        revision=experience.revision,
        turn_ids=experience.turn_ids,
        dropped=dropped,
        detail=detail,
        left_out=left_out,
    )
