"""Formulas that compute advantages from rewards: one entry per branch (`_B`), statistics over runs.

Each function takes the branches' rewards, their shares of their runs and their runs' names. A run that was split over
several branches counts once in every mean, however it was split. Formulas and sources: docs/algorithms.md. Sums are
correctly rounded (`math.fsum`), so that a replay on another machine makes the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypeVar

from headrace_trainer.algorithms.baselines import Baselines, Decay, Mean, Run

Floats = Sequence[float]
_Name = TypeVar("_Name", str, str | None)
EPSILON = 1e-6
"""Added to standard deviations before dividing by them."""
RESOLUTION = 1e-9
"""Relative difference between a reward and a mean that counts as rounding. AdamW would make steps of it."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of branches (token sequences of runs), `(reward - baseline) / scale`, with baselines and scales.

    A later revision of a branch's reward is compared with the same baseline and scale.
    """

    values_B: Floats
    baselines_B: Floats
    scales_B: Floats
    turn_baselines_B: Floats = ()
    """Baselines of the rewards of turns, where turns have advantages of their own."""
    turn_scales_B: Floats = ()

    @classmethod
    def of(cls, rewards_B: Floats, baselines_B: Floats, scales_B: Floats) -> Advantages:
        triples = zip(rewards_B, baselines_B, scales_B, strict=True)
        values_B = [
            0.0
            if math.isclose(reward, baseline, rel_tol=RESOLUTION, abs_tol=RESOLUTION)
            else (reward - baseline) / scale
            for reward, baseline, scale in triples
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
    tasks_min: int,
    scale_min: float | None,
) -> tuple[Advantages, Baselines]:
    """Compute REINFORCE++ advantages with a rolling baseline for each task. Single runs are enough.

    The baseline of a branch is the mean reward of its task: decayed history plus the batch, without the branch's own
    run, including branches of that run in other batches. So it is independent of the reward and the gradient stays
    unbiased. A run without a task is compared with the mean over all runs. So is a task with less than `history_min`
    other runs, if at least `tasks_min` tasks show that tasks do not repeat. With no other run, the advantage is 0. The
    scale is the running root mean square of the differences, at least `scale_min`, or 1 where that is None: tasks
    are never normalised against each other, so constant rewards give no gradient, however different they are between
    tasks.

    Returns:
        The advantages, and the baselines updated by this batch.
    """
    run_sums, batch = _sums(runs_B, rewards_B, weights_B), _sums(tasks_B, rewards_B, weights_B)
    total = past.overall.plus(_sum(rewards_B, weights_B))
    repeat = past.tasks_repeat(tasks_min)
    baselines_B, compared_B = [], []
    for reward, run, task in zip(rewards_B, runs_B, tasks_B, strict=True):
        in_task, in_overall = decay.remaining_contribution(past, run)
        reference = total.minus(run_sums[run]).minus(in_overall)
        if task is not None:
            peers = past.task(task).plus(batch[task]).minus(run_sums[run]).minus(in_task)
            if repeat or peers.weight >= history_min - EPSILON:
                reference = peers
        compared = reference.weight >= (history_min if task is not None and repeat else 0.0) - EPSILON
        compared_B.append(compared and reference.weight > EPSILON)
        baselines_B.append(reference.value if compared_B[-1] else reward)
    rests_B = [(r - b) ** 2 for r, b in zip(rewards_B, baselines_B, strict=True)]
    shares_B = [weight * compared for weight, compared in zip(weights_B, compared_B, strict=True)]
    squares = past.squares.plus(_sum(rests_B, shares_B))
    scale = 1.0
    if scale_min is not None and squares.weight > EPSILON:
        scale = max(math.sqrt(squares.value), scale_min) + EPSILON
    task_of, rests = dict(zip(runs_B, tasks_B, strict=True)), _sums(runs_B, rests_B, shares_B)
    runs = [Run(run, task, run_sums[run], rests[run]) for run, task in task_of.items()]
    return Advantages.of(rewards_B, baselines_B, [scale] * len(rewards_B)), decay.absorb(past, runs)


def grpo(
    rewards_B: Floats,
    weights_B: Floats,
    runs_B: Sequence[str],
    groups_B: Sequence[str],
    *,
    scale_min: float | None,
) -> Advantages:
    """Compute GRPO advantages: (r - mean of the group's runs) / (their unbiased standard deviation + 1e-6).

    A deviation below `scale_min` counts as `scale_min`, so that a judge's noise about equal runs does not become a full
    advantage. None: the difference is not divided.

    Raises:
        ValueError: a group has a single run.
    """
    groups = run_means(rewards_B, weights_B, runs_B, groups_B)
    means = {group: fmean(runs.values()) for group, runs in groups.items()}
    scales = {
        group: 1.0 if scale_min is None else max(stdev(runs.values()), scale_min) + EPSILON
        for group, runs in groups.items()
    }
    return Advantages.of(rewards_B, [means[group] for group in groups_B], [scales[group] for group in groups_B])


def rloo(rewards_B: Floats, weights_B: Floats, runs_B: Sequence[str], groups_B: Sequence[str]) -> Advantages:
    """Compute leave-one-out advantages: r - mean of the group's other runs.

    Raises `ValueError` for a group with a single run.
    """
    groups = run_means(rewards_B, weights_B, runs_B, groups_B)
    baselines_B = [
        fmean(mean for name, mean in groups[group].items() if name != run)
        for run, group in zip(runs_B, groups_B, strict=True)
    ]
    return Advantages.of(rewards_B, baselines_B, [1.0] * len(rewards_B))


def run_means(
    rewards_B: Floats, weights_B: Floats, runs_B: Sequence[str], groups_B: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the reward of each run, by group and run: the weighted mean over its branches."""
    sums = _sums(runs_B, rewards_B, weights_B)
    groups: dict[str, dict[str, float]] = {}
    for run, group in zip(runs_B, groups_B, strict=True):
        groups.setdefault(group, {})[run] = sums[run].value
    single = [group for group, runs in groups.items() if len(runs) < 2]
    if single:
        raise ValueError(f"group {single[0]!r} has one run, whose advantage is 0; train groups of two or more runs")
    return groups


def _sums(names_B: Sequence[_Name], rewards_B: Floats, weights_B: Floats) -> dict[_Name, Mean]:
    members: dict[_Name, list[int]] = {}
    for index, name in enumerate(names_B):
        members.setdefault(name, []).append(index)
    return {
        name: _sum([rewards_B[i] for i in indices], [weights_B[i] for i in indices])
        for name, indices in members.items()
    }


def _sum(values_B: Floats, weights_B: Floats) -> Mean:
    pairs = zip(values_B, weights_B, strict=True)
    return Mean(total=math.fsum(value * weight for value, weight in pairs), weight=math.fsum(weights_B))
