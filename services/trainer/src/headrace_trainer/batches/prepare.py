"""From the experiences of a batch to what is trained: advantages first, then arrays. Pure: nothing is changed (P9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import Rewarded
from headrace_trainer.algorithms.settings import AdvantageSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.experiences.admission import missing_advantage, stale
from headrace_trainer.experiences.state import LineageState, TrainedExperience
from headrace_trainer.experiences.waiting import Waiting, run_of, task_of


@dataclass(frozen=True)
class Prepared:
    """A batch, what the state records once it was trained, and the baselines that include it."""

    batch: Batch
    trained: tuple[TrainedExperience, ...]
    baselines: Baselines


def prepare(
    items: Sequence[Waiting], state: LineageState, settings: AdvantageSettings, decay: Decay, whole: int | None = None
) -> Prepared:
    """Rows in the order of `items`, of which a `whole` batch has so many. Corrections take what is missing; they
    neither see nor move the baselines."""
    for item in items:
        assert stale(item.experience, state.history, state.limits.max_staleness) is None, "P5: swept just before"
    new = [item for item in items if not state.is_correction(item)]
    found, baselines = _advantages(new, state.baselines, settings, decay)
    first = {
        item.experience.experience_id: TrainedExperience(item, _bounded(value, settings.limit), baseline, scale)
        for item, value, baseline, scale in zip(new, found.values_B, found.baselines_B, found.scales_B, strict=True)
    }
    trained = tuple(first.get(item.experience.experience_id) or _correction(item, state) for item in items)
    rows = tuple(Row.of(one.waiting.experience, one.advantage, state.current, one.token_weight) for one in trained)
    return Prepared(Batch(rows, whole), trained, baselines)


def _advantages(
    items: Sequence[Waiting], past: Baselines, settings: AdvantageSettings, decay: Decay
) -> tuple[Advantages, Baselines]:
    if not items:
        return Advantages((), (), ()), past
    experiences_B = [item.experience for item in items]
    rewards_B = [experience.reward for experience in experiences_B if experience.reward is not None]
    assert len(rewards_B) == len(items), "P6: only a correction may lack a reward"
    weights_B = [experience.weight for experience in experiences_B]
    runs_B = [run_of(experience) for experience in experiences_B]
    tasks_B = [task_of(experience) for experience in experiences_B]
    batch = Rewarded(rewards_B, weights_B, runs_B, tasks_B)
    return settings.estimator.compute(batch, past, decay, settings)


def _correction(item: Waiting, state: LineageState) -> TrainedExperience:
    entry = state.window.get(item.experience.experience_id)
    assert entry is not None
    missing = missing_advantage(item.experience, entry, state.history, state.steps, state.limits.advantage_max)
    held = entry.held(state.history, state.steps)
    weight = held[0].token_weight if held else None
    return TrainedExperience(item, float(np.float32(missing)), entry.baseline, entry.scale, True, weight)


def _bounded(advantage: float, limit: float) -> float:
    """What the loss will really see: clipped, and in single precision."""
    return float(np.float32(max(-limit, min(limit, advantage))))
