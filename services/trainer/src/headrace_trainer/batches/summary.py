"""What is worth knowing about the experiences of a batch and about the time between two saves. Numbers by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from headrace_schemas import TrainingOutcome
from headrace_trainer.batches.prepare import Prepared
from headrace_trainer.experiences.admission import versions_of
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.waiting import run_of, task_of

TASKS_MAX = 32
"""Tasks whose mean reward is reported one by one: the most frequent of the batch."""
VALUES_MAX = 256
"""What the events take."""
_TASK = "reward/"


def of_batch(prepared: Prepared, history: History) -> dict[str, float]:
    """Rewards (means over runs, corrections apart), staleness as a histogram, and how much there was."""
    rewards: list[tuple[float, float]] = []
    tasks: dict[str, list[tuple[float, float]]] = {}
    staleness: Counter[int] = Counter()
    for one in prepared.trained:
        experience = one.waiting.experience
        staleness[history.staleness(versions_of(experience)) or 0] += 1
        if one.correction or experience.reward is None:
            continue
        rewards.append((experience.reward, experience.weight))
        tasks.setdefault(task_of(experience) or "", []).append(rewards[-1])
    tasks.pop("", None)
    found = {
        "experiences": float(len(prepared.trained)),
        "corrections": float(len(prepared.trained) - len(rewards)),
        "runs": math.fsum(weight for _, weight in rewards),
        "staleness_mean": sum(distance * count for distance, count in staleness.items()) / staleness.total(),
        "staleness_max": float(max(staleness)),
        "zero_advantage_fraction": sum(one.advantage == 0 for one in prepared.trained) / len(prepared.trained),
    }
    groups = _groups(prepared)
    if groups:
        found["groups"] = float(len(groups))
        found["zero_advantage_group_fraction"] = sum(not any(group) for group in groups) / len(groups)
    if rewards:
        found["reward_mean"] = _mean(rewards)
    for task, pairs in sorted(tasks.items(), key=lambda item: (-len(item[1]), item[0]))[:TASKS_MAX]:
        found[f"{_TASK}{task}"] = _mean(pairs)
    for distance, count in sorted(staleness.items()):
        found[f"staleness/{distance}"] = float(count)
    return found


def _groups(prepared: Prepared) -> list[list[float]]:
    """The advantages of each task of which the batch holds several runs."""
    groups: dict[str, list[float]] = {}
    runs: dict[str, set[str]] = {}
    for one in prepared.trained:
        task = task_of(one.waiting.experience)
        if task is not None and not one.correction:
            groups.setdefault(task, []).append(one.advantage)
            runs.setdefault(task, set()).add(run_of(one.waiting.experience))
    return [advantages for task, advantages in groups.items() if len(runs[task]) > 1]


def between_saves(steps: Sequence[Mapping[str, float]], outcomes: Sequence[TrainingOutcome]) -> dict[str, float]:
    """Each step measure's mean over the steps that have it, and how many experiences had which outcome."""
    counts = Counter(
        "trained" if outcome.dropped is None else f"dropped/{outcome.detail or outcome.dropped}" for outcome in outcomes
    )
    found = {"steps": float(len(steps)), **{name: float(count) for name, count in sorted(counts.items())}}
    names = dict.fromkeys(name for step in steps for name in step)
    for name in sorted(names, key=lambda name: name.startswith(_TASK)):  # if there are too many, tasks are left out
        found[name[:512]] = _average([step[name] for step in steps if name in step])
    return {name: value for name, value in list(found.items())[:VALUES_MAX] if math.isfinite(value)}


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    return math.fsum(value * weight for value, weight in pairs) / math.fsum(weight for _, weight in pairs)


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
