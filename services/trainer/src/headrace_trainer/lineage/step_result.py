"""Combines the plan of a step with its result, for the dedupe window. Pure."""

from __future__ import annotations

from dataclasses import replace

from headrace_trainer.batches.prepare import PreparedBatch
from headrace_trainer.experiences.trained_experience import TrainedExperience
from headrace_trainer.learner import StepResult


def apply_result(prepared: PreparedBatch, result: StepResult, *, has_teacher: bool = False) -> list[TrainedExperience]:
    """Return what the weights hold of each row after the step.

    A row that the loss left out counts as trained, but the weights hold nothing of it, so a correction adds all of its
    advantage. Where a critic computed the advantage from the reward, that advantage is recorded, and the rest of the
    reward is its baseline.

    Args:
        prepared: The plan of the step.
        result: The result of the step.
        has_teacher: Whether a teacher computed the advantages of the tokens of all new rows.
    """
    records = []
    for planned, row in zip(prepared.trained, prepared.batch.rows, strict=True):
        name = row.name
        by_teacher = (has_teacher and not row.correction) or row.hindsight is not None
        record = replace(
            planned,
            factor=prepared.batch.factor(row) * result.slopes.get(name, 1.0),
            loss_advantage=None if by_teacher else float(row.advantage),
        )
        if name in result.advantages and not row.correction:
            advantage = result.advantages[name]
            record = replace(
                record,
                advantage=advantage,
                loss_advantage=advantage,
                baseline=float(row.advantage) - advantage,
                scale=1.0,
                reappraised=True,
            )
        if name in result.left_out:
            record = replace(record, advantage=0.0, loss_advantage=0.0, turns=tuple(0.0 for _ in record.turns))
        records.append(record)
    return records
