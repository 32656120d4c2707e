"""Rolling means of rewards: per task, over all tasks, and of the squared differences that set the scale.

A mean is a pair of decayed sums, m = Σ λ^age w r / Σ λ^age w, which is exact for a constant reward from the first run
on and needs no correction for its short past. Age is counted in runs (a branch adds its share), not in time and not in
batches: of two runs in one batch the earlier one ages by the later one.

The contribution of each recent run is remembered, because another branch of the run may come later, and must not be
compared with its own run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from headrace_schemas.values.base import Finite, Model
from headrace_trainer.algorithms.reward_ranges import Bounds, RangeLimits, RewardRanges

_ROUNDING = 1e-6
_SPREADS_MAX = 2.0
"""Largest standard deviation of winsorised rewards, in units of their spread, which a normal distribution's is half."""


class Mean(Model):
    """Decayed weighted mean, stored as its weighted sum (`total`) and its `weight`."""

    total: Finite = 0.0
    weight: Finite = 0.0
    age: Finite = 0.0
    """Number of runs that it has absorbed."""

    @property
    def value(self) -> float:
        return self.total / self.weight

    def plus(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, weight=self.weight + other.weight)

    def minus(self, other: Mean) -> Mean:
        return Mean(total=self.total - other.total, weight=self.weight - other.weight)

    def absorb(self, new: Mean, decay: float) -> Mean:
        """Return the mean that adds `new` to this one after this one has decayed by `decay ** new.weight`."""
        aged = self.decay_by(new.weight, decay)
        return Mean(total=aged.total + new.total, weight=aged.weight + new.weight, age=self.age + new.weight)

    def winsorise(self, bounds: Bounds) -> Mean:
        """Return the mean, moved to the nearest value of the window if it lies beyond all of them by half a spread."""
        value, margin = self.value if self.weight > _ROUNDING else bounds.low, bounds.spread / 2
        if bounds.low - margin <= value <= bounds.high + margin:
            return self
        return self.model_copy(update={"total": min(max(value, bounds.low), bounds.high) * self.weight})

    def decay_by(self, runs: float, decay: float) -> Mean:
        """Return the mean with `total` and `weight` multiplied by `decay ** runs`."""
        factor = decay**runs
        return Mean(total=self.total * factor, weight=self.weight * factor)


class RunContribution(Model):
    """Contribution of one run to the mean of its task and to the overall mean, with the age of each when it was
    added."""

    task: str | None
    in_task: Mean
    task_age: Finite
    in_overall: Mean
    overall_age: Finite


@dataclass(frozen=True, slots=True)
class Run:
    """Weighted sums of the rewards, and of the squared differences from baselines, of one run's branches in a batch."""

    name: str
    task: str | None
    rewards: Mean
    squares: Mean


class Baselines(Model):
    """Running statistics of rewards, which estimators keep between batches. Immutable; saved with the weights."""

    tasks: dict[str, Mean] = Field(default_factory=dict)
    """Means of the tasks, least recently updated first."""
    overall: Mean = Mean()
    squares: Mean = Mean()
    """Mean of the squared differences between rewards and their baselines."""
    runs: dict[str, RunContribution] = Field(default_factory=dict)
    """Contributions of recent runs, least recently absorbed first."""
    ranges: RewardRanges = RewardRanges()
    """Ranges of the reward sources, by which stray values are winsorised."""

    def task(self, name: str) -> Mean:
        return self.tasks.get(name, Mean())

    def tasks_repeat(self, tasks_min: int) -> bool:
        """Return whether tasks repeat: False if there are at least `tasks_min` tasks and most had a single run."""
        once = sum(mean.weight <= 1.0 + _ROUNDING for mean in self.tasks.values())
        return len(self.tasks) < tasks_min or 2 * once <= len(self.tasks)

    def repair(self, ranges: RewardRanges, limits: RangeLimits, rewards: Mapping[str, Sequence[float]]) -> Baselines:
        """Return the baselines with `ranges`, and with the means corrected that are implausible by these ranges.

        A mean that lies beyond the last rewards by more than half a spread becomes the nearest of them, because they
        have another unit. A deviation of more than `_SPREADS_MAX` spreads becomes that of the last rewards. The mean of
        a task is only examined where `rewards` has its rewards of this batch, and all of these are within the bounds.
        """
        bounds = ranges.combined_bounds(limits)
        if bounds is None:
            return self.model_copy(update={"ranges": ranges})
        means = {
            name: self.tasks[name].winsorise(bounds)
            for name, values in rewards.items()
            if name in self.tasks and all(bounds.winsorise(value) == value for value in values)
        }
        overall, squares = self.overall.winsorise(bounds), self.squares
        if squares.weight > _ROUNDING and squares.value > (_SPREADS_MAX * bounds.spread) ** 2:
            squares = squares.model_copy(update={"total": ranges.variance * squares.weight})
        update: dict[str, object] = {"ranges": ranges}
        if squares != self.squares or overall != self.overall or any(self.tasks[name] != means[name] for name in means):
            tasks_kept = {name: means.get(name, mean) for name, mean in self.tasks.items()}
            # The shares of single runs are parts of the sums that have just been replaced.
            update |= {"tasks": tasks_kept, "overall": overall, "squares": squares, "runs": {}}
        return self.model_copy(update=update)


class Decay(Model):
    """Rates at which past rewards decay, and numbers of remembered tasks and runs; see the settings of the same
    names."""

    task: Finite
    model: Finite
    tasks_max: int
    runs_max: int = 1024

    def remaining_contribution(self, past: Baselines, run: str) -> tuple[Mean, Mean]:
        """Return a run's decayed contributions to the present mean of its task and to the mean over all tasks."""
        return self._remaining(past.runs.get(run), past.tasks, past.overall)

    def absorb(self, old: Baselines, batch: Sequence[Run]) -> Baselines:
        """Return the baselines to which the runs of a batch were added one after the other, each decaying the
        earlier."""
        tasks, runs, overall, squares = dict(old.tasks), dict(old.runs), old.overall, old.squares
        for run in batch:
            in_task, in_overall = self._remaining(runs.get(run.name), tasks, overall)
            task_age = 0.0
            if run.task is not None:
                tasks[run.task] = tasks.pop(run.task, Mean()).absorb(run.rewards, self.task)
                task_age = tasks[run.task].age
            overall = overall.absorb(run.rewards, self.model)
            squares = squares.absorb(run.squares, self.model)
            runs.pop(run.name, None)
            runs[run.name] = RunContribution(
                task=run.task,
                in_task=in_task.absorb(run.rewards, self.task),
                task_age=task_age,
                in_overall=in_overall.absorb(run.rewards, self.model),
                overall_age=overall.age,
            )
        surplus = list(tasks)[: max(0, len(tasks) - self.tasks_max)]
        for name in surplus:
            del tasks[name]
        runs = {name: run for name, run in runs.items() if run.task is None or run.task in tasks}
        for name in list(runs)[: max(0, len(runs) - self.runs_max)]:
            del runs[name]
        return Baselines(tasks=tasks, overall=overall, squares=squares, runs=runs, ranges=old.ranges)

    def _remaining(
        self, contribution: RunContribution | None, tasks: Mapping[str, Mean], overall: Mean
    ) -> tuple[Mean, Mean]:
        if contribution is None:
            return Mean(), Mean()
        age = tasks[contribution.task].age if contribution.task is not None else contribution.task_age
        return (
            contribution.in_task.decay_by(age - contribution.task_age, self.task),
            contribution.in_overall.decay_by(overall.age - contribution.overall_age, self.model),
        )
