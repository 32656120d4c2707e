"""Summaries for reports: the experiences of a batch, and the steps between two saves. Numbers by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from headrace_schemas import TrainingOutcome
from headrace_trainer.batches.prepare import PreparedBatch
from headrace_trainer.experiences.admission import versions_of
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import run_of, task_of

TASKS_MAX = 32
"""Number of tasks whose mean reward is reported separately: the most frequent of the batch."""
VALUES_MAX = 256
"""Number of values that an event may hold."""
_TASK = "reward/"


def summarize_batch(prepared: PreparedBatch, state: LineageState) -> dict[str, float]:
    """Return measures of a batch by name: rewards (means over runs, without corrections), a histogram of staleness,
    counts."""
    rewards: list[tuple[float, float]] = []
    tasks: dict[str, list[tuple[float, float]]] = {}
    staleness: Counter[int] = Counter()
    for record in prepared.trained:
        experience = record.waiting.experience
        versions = versions_of(experience, state.limits.rules)
        staleness[state.history.staleness(versions) or 0] += 1
        if record.correction or experience.reward is None:
            continue
        rewards.append((experience.reward, experience.weight))
        tasks.setdefault(task_of(experience) or "", []).append(rewards[-1])
    tasks.pop("", None)
    values = {
        "experiences": float(len(prepared.trained)),
        "corrections": float(len(prepared.trained) - len(rewards)),
        "runs": math.fsum(weight for _, weight in rewards),
        "staleness_mean": sum(distance * count for distance, count in staleness.items()) / staleness.total(),
        "staleness_max": float(max(staleness)),
        "zero_advantage_fraction": sum(record.advantage == 0 for record in prepared.trained) / len(prepared.trained),
    }
    experiences = {record.waiting.experience.experience_id: record.waiting.experience for record in prepared.trained}
    for experience in experiences.values():
        for span in experience.branch.spans if experience.branch and experience.origin == "sampled" else ():
            tokens = len(span.logprobs)
            values[f"tokens/{span.token_kind}"] = values.get(f"tokens/{span.token_kind}", 0.0) + tokens
    groups = _groups(prepared)
    if groups:
        values["groups"] = float(len(groups))
        values["zero_advantage_group_fraction"] = sum(not any(group) for group in groups) / len(groups)
    if rewards:
        values["reward_mean"] = _mean(rewards)
    for task, pairs in sorted(tasks.items(), key=lambda item: (-len(item[1]), item[0]))[:TASKS_MAX]:
        values[f"{_TASK}{task}"] = _mean(pairs)
    for distance, count in sorted(staleness.items()):
        values[f"staleness/{distance}"] = float(count)
    return values


def _groups(prepared: PreparedBatch) -> list[list[float]]:
    """Return the advantages in each task with several runs in the batch."""
    groups: dict[str, list[float]] = {}
    runs: dict[str, set[str]] = {}
    for record in prepared.trained:
        task = task_of(record.waiting.experience)
        if task is not None and not record.correction:
            groups.setdefault(task, []).append(record.advantage)
            runs.setdefault(task, set()).add(run_of(record.waiting.experience))
    return [advantages for task, advantages in groups.items() if len(runs[task]) > 1]


def summarize_steps(steps: Sequence[Mapping[str, float]], outcomes: Sequence[TrainingOutcome]) -> dict[str, float]:
    """Return the mean of each measure over the steps that have it, and the number of experiences with each outcome."""
    counts = Counter("trained" if outcome.dropped is None else f"dropped/{outcome.reason_name}" for outcome in outcomes)
    values = {"steps": float(len(steps)), **{name: float(count) for name, count in sorted(counts.items())}}
    names = dict.fromkeys(name for step in steps for name in step)
    for name in sorted(names, key=lambda name: name.startswith(_TASK)):  # if there are too many, tasks are left out
        values[name[:512]] = _average([step[name] for step in steps if name in step])
    return {name: value for name, value in list(values.items())[:VALUES_MAX] if math.isfinite(value)}


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    return math.fsum(value * weight for value, weight in pairs) / math.fsum(weight for _, weight in pairs)


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
