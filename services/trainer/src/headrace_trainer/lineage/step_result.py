"""Combines the plan of a step with its result, for the dedupe window. Pure."""

from __future__ import annotations

from dataclasses import replace

from headrace_trainer.batches.prepare import PreparedBatch
from headrace_trainer.experiences.trained_experience import TrainedExperience
from headrace_trainer.learner import StepResult


def apply_result(prepared: PreparedBatch, result: StepResult) -> list[TrainedExperience]:
    """Return what the weights hold of each row after the step.

    A row that the loss left out counts as trained, but the weights hold nothing of it, so a correction adds all of its
    advantage. Where a critic computed the advantage from the reward, that advantage is recorded, and the rest of the
    reward is its baseline.
    """
    records = []
    for planned, row in zip(prepared.trained, prepared.batch.rows, strict=True):
        name = row.name
        record = replace(planned, factor=prepared.batch.factor(row) * result.slopes.get(name, 1.0))
        if name in result.advantages and not row.correction:
            advantage = result.advantages[name]
            record = replace(
                record, advantage=advantage, baseline=float(row.advantage) - advantage, scale=1.0, reappraised=True
            )
        if name in result.left_out:
            record = replace(record, advantage=0.0, turns=tuple(0.0 for _ in record.turns))
        records.append(record)
    return records
