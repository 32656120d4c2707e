"""Rolling means of rewards: per task, over all tasks, and of the squared rest that sets the scale.

A mean is a pair of decayed sums, m = Σ λ^age w r / Σ λ^age w, which is exact for a constant reward from the first run
on and needs no correction for its short past. Age is counted in runs (a branch adds its share), not in time.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from headrace_schemas.base import Finite, Model


class Mean(Model):
    """A weighted mean as its two sums."""

    total: Finite = 0.0
    weight: Finite = 0.0

    @property
    def value(self) -> float:
        return self.total / self.weight

    def plus(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, weight=self.weight + other.weight)

    def minus(self, other: Mean) -> Mean:
        return Mean(total=self.total - other.total, weight=self.weight - other.weight)

    def absorb(self, new: Mean, decay: float) -> Mean:
        """Age by the new weight, then add it."""
        kept = decay**new.weight
        return Mean(total=self.total * kept + new.total, weight=self.weight * kept + new.weight)


class Baselines(Model):
    """All that advantages remember between batches. Immutable; saved with the weights."""

    tasks: dict[str, Mean] = Field(default_factory=dict)
    """The one updated longest ago first."""
    overall: Mean = Mean()
    squares: Mean = Mean()
    """Of what rewards differ from their baselines by."""

    def task(self, name: str) -> Mean:
        return self.tasks.get(name, Mean())


class Decay(Model):
    """How fast the past fades and how many tasks have one; see the settings of the same names."""

    task: Finite
    model: Finite
    tasks_max: int

    def absorb(self, old: Baselines, batch: Mapping[str, Mean], overall: Mean, squares: Mean) -> Baselines:
        """`old` with a batch in it: its sums per task, over everything, and of the squares."""
        tasks = dict(old.tasks)
        for name, new in batch.items():
            tasks[name] = tasks.pop(name, Mean()).absorb(new, self.task)
        for name in list(tasks)[: max(0, len(tasks) - self.tasks_max)]:
            del tasks[name]
        return Baselines(
            tasks=tasks,
            overall=old.overall.absorb(overall, self.model),
            squares=old.squares.absorb(squares, self.model),
        )
