"""Reports of a save: the published part of the lineage's state, and the outcomes that wait for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace_schemas import BatchRecord, Experience, Read, Restored, TrainingOutcome, Undone
from headrace_schemas.events.checkpoint import TURNS_MAX, DropReason, TurnAdvantage
from headrace_schemas.values.base import Model
from headrace_trainer.experiences.pending_updates import CorrectionRules
from headrace_trainer.experiences.trained_experience import TrainedExperience

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
    experience: Experience,
    dropped: DropReason | None,
    detail: str | None,
    left_out: tuple[str, ...],
    records: Sequence[TrainedExperience],
    rules: CorrectionRules,
) -> TrainingOutcome:
    """Return the outcome of a revision.

    Args:
        experience: The revision.
        dropped: Why it was dropped, or None if it was trained.
        detail: Detail of the reason.
        left_out: Its turns whose answers lack logprobs that training needs.
        records: Its examples as a step trained them; empty if it was dropped.
        rules: The rules that select the trained spans of a branch.
    """
    advantage, turns = None, []
    for record in records:
        example, value = record.example, record.loss_advantage
        if example.part and example.turn_id and value is not None:
            turns.append(TurnAdvantage(turn_id=example.turn_id, advantage=value, edited=bool(example.tokens)))
        elif value is not None:
            advantage = value
            turns += _turn_advantages(record, rules)
    return TrainingOutcome(
        experience_id=experience.experience_id,
        revision=experience.revision,
        turn_ids=experience.turn_ids,
        dropped=dropped,
        detail=detail,
        left_out=left_out,
        advantage=advantage,
        turn_advantages=tuple(turns[:TURNS_MAX]),
    )


def _turn_advantages(record: TrainedExperience, rules: CorrectionRules) -> list[TurnAdvantage]:
    """Return the mean advantage of each turn of a branch over its tokens; empty where the branch has only one."""
    branch = record.waiting.experience.branch
    trained = None if branch is None or not record.turns else rules.trained_branch(branch)
    if trained is None:
        return []
    sums: dict[str, tuple[float, int]] = {}
    for span, advantage in zip(trained.spans, record.turns, strict=True):
        total, tokens = sums.get(span.turn_id, (0.0, 0))
        sums[span.turn_id] = total + advantage * len(span.logprobs), tokens + len(span.logprobs)
    return [TurnAdvantage(turn_id=name, advantage=total / tokens) for name, (total, tokens) in sums.items() if tokens]
