"""What a step did with each row, beside what it was asked to do. Pure."""

from __future__ import annotations

from dataclasses import replace

from headrace_trainer.batches.prepare import Prepared
from headrace_trainer.experiences.trained_experience import TrainedExperience
from headrace_trainer.learner import StepResult


def as_taken(prepared: Prepared, taken: StepResult) -> list[TrainedExperience]:
    """For the window. What the loss left out is trained, and the weights hold nothing of it: a correction has all of it
    to add. What a critic made of a reward is the advantage that was trained, and the rest of the reward its
    baseline."""
    found = []
    for one, row in zip(prepared.trained, prepared.batch.rows, strict=True):
        name = row.name
        trained = replace(one, factor=prepared.batch.factor(row) * taken.slopes.get(name, 1.0))
        if name in taken.advantages and not row.correction:
            advantage = taken.advantages[name]
            trained = replace(
                trained, advantage=advantage, baseline=float(row.advantage) - advantage, scale=1.0, anew=True
            )
        if name in taken.left_out:
            trained = replace(trained, advantage=0.0, turns=tuple(0.0 for _ in trained.turns))
        found.append(trained)
    return found
