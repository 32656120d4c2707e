"""From rewards to advantages, on plain numbers: one entry per branch (`_B`), statistics over runs (pitfall 9).

Each function takes the branches' rewards, their shares of their runs and their runs' names. A run that was split over
several branches counts once in every mean, however it was split. Formulas and sources: docs/algorithms.md. Sums are
correctly rounded (`math.fsum`), so that a replay on another machine makes the same batches (P9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from headrace_trainer.baselines import Baselines, Decay, Mean

Floats = Sequence[float]
EPSILON = 1e-6
"""Added to standard deviations before dividing by them."""
RESOLUTION = 1e-9
"""A smaller difference between a reward and a mean, relative to them, is rounding. AdamW would make steps of it."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """`(reward - baseline) / scale` of each branch, with the terms that made it: a later revision is judged by them."""

    values_B: Floats
    baselines_B: Floats
    scales_B: Floats

    @classmethod
    def of(cls, rewards_B: Floats, baselines_B: Floats, scales_B: Floats) -> Advantages:
        terms = zip(rewards_B, baselines_B, scales_B, strict=True)
        values_B = [
            0.0
            if math.isclose(reward, baseline, rel_tol=RESOLUTION, abs_tol=RESOLUTION)
            else (reward - baseline) / scale
            for reward, baseline, scale in terms
        ]
        return cls(values_B, baselines_B, scales_B)


def reinforce_pp(
    rewards_B: Floats,
    weights_B: Floats,
    runs_B: Sequence[str],
    tasks_B: Sequence[str | None],
    past: Baselines,
    decay: Decay,
    *,
    history_min: float,
    scaled: bool,
) -> tuple[Advantages, Baselines]:
    """REINFORCE++ with a rolling baseline per task. Works on single runs (pitfall 11).

    The baseline of a branch is the mean reward of its task: decayed history plus the batch, without the branch's own
    run, so it is independent of what it is compared with and the gradient stays unbiased. A task with less than
    `history_min` runs to compare with borrows the mean over all tasks; where there is nothing at all, the advantage is
    0. The scale is the running root mean square of what is left: tasks are never normalised against each other
    (pitfall 12), so constant rewards give no gradient, however different they are between tasks.

    Also returns the baselines with this batch in them.
    """
    own, batch = _sums(runs_B, rewards_B, weights_B), _sums(tasks_B, rewards_B, weights_B)
    total = _sum(rewards_B, weights_B)
    everything = past.overall.plus(total)
    baselines_B = []
    for reward, run, task in zip(rewards_B, runs_B, tasks_B, strict=True):
        others = everything.minus(own[run])
        if task is not None:
            peers = past.task(task).plus(batch[task]).minus(own[run])
            if peers.weight >= history_min - EPSILON:
                others = peers
        baselines_B.append(others.value if others.weight > EPSILON else reward)
    squares = _sum([(r - b) ** 2 for r, b in zip(rewards_B, baselines_B, strict=True)], weights_B)
    scale = math.sqrt(past.squares.plus(squares).value) + EPSILON if scaled else 1.0
    sums_of_tasks = {task: mean for task, mean in batch.items() if task is not None}
    present = decay.absorb(past, sums_of_tasks, total, squares)
    return Advantages.of(rewards_B, baselines_B, [scale] * len(rewards_B)), present


def grpo(
    rewards_B: Floats, weights_B: Floats, runs_B: Sequence[str], groups_B: Sequence[str], *, scaled: bool
) -> Advantages:
    """(r - mean of the group's runs) / (their unbiased standard deviation + 1e-6). Raises `ValueError` for single
    runs."""
    groups = _run_means(rewards_B, weights_B, runs_B, groups_B)
    means = {group: fmean(runs.values()) for group, runs in groups.items()}
    scales = {group: stdev(runs.values()) + EPSILON if scaled else 1.0 for group, runs in groups.items()}
    return Advantages.of(rewards_B, [means[group] for group in groups_B], [scales[group] for group in groups_B])


def rloo(rewards_B: Floats, weights_B: Floats, runs_B: Sequence[str], groups_B: Sequence[str]) -> Advantages:
    """r - mean of the group's other runs. Raises `ValueError` for single runs."""
    groups = _run_means(rewards_B, weights_B, runs_B, groups_B)
    baselines_B = [
        fmean(mean for name, mean in groups[group].items() if name != run)
        for run, group in zip(runs_B, groups_B, strict=True)
    ]
    return Advantages.of(rewards_B, baselines_B, [1.0] * len(rewards_B))


def _run_means(
    rewards_B: Floats, weights_B: Floats, runs_B: Sequence[str], groups_B: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Group to run to the run's reward, the weighted mean of its branches."""
    sums = _sums(runs_B, rewards_B, weights_B)
    groups: dict[str, dict[str, float]] = {}
    for run, group in zip(runs_B, groups_B, strict=True):
        groups.setdefault(group, {})[run] = sums[run].value
    single = [group for group, runs in groups.items() if len(runs) < 2]
    if single:
        raise ValueError(f"group {single[0]!r} has one run: it is its own mean, and nothing would be learned")
    return groups


def _sums(names_B: Sequence[str | None], rewards_B: Floats, weights_B: Floats) -> dict[str | None, Mean]:
    members: dict[str | None, list[int]] = {}
    for index, name in enumerate(names_B):
        members.setdefault(name, []).append(index)
    return {name: _sum([rewards_B[i] for i in who], [weights_B[i] for i in who]) for name, who in members.items()}


def _sum(values_B: Floats, weights_B: Floats) -> Mean:
    pairs = zip(values_B, weights_B, strict=True)
    return Mean(total=math.fsum(value * weight for value, weight in pairs), weight=math.fsum(weights_B))
