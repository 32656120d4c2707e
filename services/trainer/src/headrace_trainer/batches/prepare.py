"""From the experiences of a batch to what is trained: advantages first, then arrays. Pure: nothing is changed (P9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace_runtime.isolation import is_fatal, reason_of
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import Rewarded
from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings
from headrace_trainer.batches.batch import Batch
from headrace_trainer.batches.rows import row_of
from headrace_trainer.experiences.admission import stale
from headrace_trainer.experiences.due import Due, Turns, turns_of
from headrace_trainer.experiences.pairing import met
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.trained_experience import TrainedExperience
from headrace_trainer.experiences.waiting import Waiting, run_of, task_of


@dataclass(frozen=True)
class Prepared:
    """A batch, what the state records once it was trained, and the baselines that include it."""

    batch: Batch
    trained: tuple[TrainedExperience, ...]
    baselines: Baselines


def prepare(
    items: Sequence[Waiting],
    state: LineageState,
    settings: AdvantageSettings,
    decay: Decay,
    whole: int | None = None,
    loss: LossSettings | None = None,
) -> Prepared:
    """Rows in the order of `items`, of which a `whole` batch has so many. Corrections take what is missing; they
    neither see nor move the baselines."""
    for item in items:
        assert stale(item.experience, state.history, state.limits.max_staleness) is None, "P5: swept just before"
    due = [(item, one) for item in items for one in state.due(item)]
    pairs = met([(item.experience.experience_id, one.example) for item, one in due if one.new])
    trainable = [(item, one) for item, one in due if _goes(item, one, pairs)]
    past, new = _winsorised([item for item, one in trainable if one.missing is None], state, settings)
    found, baselines = _advantages(new, past, state, settings, decay)
    first = {
        item.experience.experience_id: _first(item, index, found, state, settings) for index, item in enumerate(new)
    }
    trained = tuple(
        first[item.experience.experience_id] if one.missing is None else _of(item, one, state)
        for item, one in trainable
    )
    assert {one.waiting.experience.experience_id for one in trained} == {one.experience.experience_id for one in items}
    agg_mode = loss.agg_mode if loss else "token-mean"
    by_sequence = agg_mode.startswith("seq-")
    replies = state.limits.replies
    rows = tuple(row_of(one, state.current, pairs, by_sequence=by_sequence, replies=replies) for one in trained)
    size = whole if whole is None or len(rows) == len(items) else whole * len(rows) / len(items)
    return Prepared(Batch(rows, size, agg_mode, loss.horizon_tokens if loss else 1), trained, baselines)


@dataclass(frozen=True)
class Isolated:
    """What is left of a batch without the experiences that break its preparation."""

    items: tuple[Waiting, ...]
    prepared: Prepared | None
    """None: nothing is left."""
    culprits: tuple[tuple[Waiting, str], ...] = ()
    """The experiences that break it, with the reasons."""


def prepare_isolated(items: Sequence[Waiting], ready: Callable[[Sequence[Waiting]], Prepared]) -> Isolated:
    """Prepare a batch with `ready`, without the experiences because of which it raises.

    Raises:
        Exception: `ready` raised it, and no experience is at fault.
    """
    try:
        return Isolated(tuple(items), ready(items))
    except Exception:
        culprits = poisoned(items, ready)
        if not culprits:
            raise
    left = tuple(item for item in items if all(item is not culprit for culprit, _ in culprits))
    return Isolated(left, ready(left) if left else None, tuple(culprits))


def poisoned(items: Sequence[Waiting], ready: Callable[[Sequence[Waiting]], object]) -> list[tuple[Waiting, str]]:
    """Return the items because of which `ready` raises for all of them, with the reasons; empty when it is no item's.

    One whose absence mends the batch is at fault. Where no single one is, those are that raise by themselves.
    """
    for index, item in enumerate(items):
        if len(items) > 1 and _raised([*items[:index], *items[index + 1 :]], ready) is None:
            return [(item, _raised([item], ready) or "the batch cannot be prepared with it")]
    alone = [(item, _raised([item], ready)) for item in items]
    return [(item, reason) for item, reason in alone if reason is not None]


def _raised(items: Sequence[Waiting], ready: Callable[[Sequence[Waiting]], object]) -> str | None:
    try:
        ready(items)
    except Exception as error:
        if is_fatal(error) or isinstance(error, OSError):
            raise
        return reason_of(error)
    return None


def _goes(item: Waiting, one: Due, pairs: dict[tuple[str, str], str]) -> bool:
    """Of answers that were compared, those whose other one is here. A correction needs none."""
    return not (one.new and one.example.pair) or (item.experience.experience_id, one.example.part) in pairs


def _first(
    item: Waiting, index: int, found: Advantages, state: LineageState, settings: AdvantageSettings
) -> TrainedExperience:
    """The first training of a branch by its reward: the `index`th of those that were compared."""
    value = _bounded(found.values_B[index], settings.limit)
    one = TrainedExperience(item, value, found.baselines_B[index], found.scales_B[index])
    credit = state.limits.rules.credit
    if credit is None or not found.turn_scales_B:
        return one
    terms = (found.turn_baselines_B[index], found.turn_scales_B[index])
    turns = credit(found.values_B[index], turns_of(item.experience), *terms)
    bounded = tuple(_bounded(turn, settings.limit) for turn in turns)
    return replace(one, turns=bounded, turn_terms=terms if terms[1] else None)


def _winsorised(
    items: Sequence[Waiting], state: LineageState, settings: AdvantageSettings
) -> tuple[Baselines, list[Waiting]]:
    """Return the baselines with the ranges of the batch's rewards in them, and `items` with winsorised rewards.

    The ranges see the whole batch before any of its rewards is compared with them.
    """
    limits = settings.range_limits
    if not items or not limits.factor:
        return state.baselines, list(items)
    experiences = [(run_of(item.experience), item.experience) for item in items]
    ranges = state.baselines.ranges.absorb(experiences, limits)
    bounded = [item.model_copy(update={"experience": ranges.bound(item.experience, limits)}) for item in items]
    rewards: dict[str, list[float]] = {}
    for item in bounded:
        task, reward = task_of(item.experience), item.experience.reward
        if task is not None and reward is not None:
            rewards.setdefault(task, []).append(reward)
    return state.baselines.repaired(ranges, limits, rewards), bounded


def _advantages(
    items: Sequence[Waiting], past: Baselines, state: LineageState, settings: AdvantageSettings, decay: Decay
) -> tuple[Advantages, Baselines]:
    worth = state.limits.rules.worth
    if not items:
        return Advantages((), (), ()), past
    experiences_B = [item.experience for item in items]
    rewards_B = [experience.reward for experience in experiences_B if experience.reward is not None]
    assert len(rewards_B) == len(items), "P6: only a correction may lack a reward"
    if worth is not None:
        rewards_B = [worth(reward) for reward in rewards_B]
    weights_B = [experience.weight for experience in experiences_B]
    runs_B = [run_of(experience) for experience in experiences_B]
    tasks_B = [task_of(experience) for experience in experiences_B]
    turns_B = [turns_of(experience) for experience in experiences_B]
    batch = Rewarded(rewards_B, weights_B, runs_B, tasks_B, turns_B)
    return settings.estimator.compute(batch, past, decay, settings)


def _of(item: Waiting, one: Due, state: LineageState) -> TrainedExperience:
    """What is said outright (a demonstration, an answer that was compared), and corrections."""
    entry = state.window.get(item.experience.experience_id)
    assert entry is not None
    assert one.missing is not None
    correction = entry.trained and (not one.new or not one.example.part)
    return TrainedExperience(
        item,
        float(np.float32(one.missing)),
        entry.baseline,
        entry.scale,
        correction,
        one.token_weight,
        one.example,
        _single(one.turns),
        entry.turn_terms,
    )


def _single(turns: Turns) -> Turns:
    return tuple(float(np.float32(turn)) for turn in turns)


def _bounded(advantage: float, limit: float) -> float:
    """What the loss will really see: clipped, and in single precision."""
    return float(np.float32(max(-limit, min(limit, advantage))))
