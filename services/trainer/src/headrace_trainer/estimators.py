"""Kinds of advantages by name: whatever an installed package announces under the entry points `headrace.advantages`.

Ours are announced in this package's own `pyproject.toml`. Another package adds one without a change here: a function
like those below, marked with `estimator`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from headrace_trainer import advantages
from headrace_trainer.advantages import Advantages, Floats
from headrace_trainer.baselines import Baselines, Decay

if TYPE_CHECKING:
    from headrace_trainer.settings import AdvantageSettings

GROUP = "headrace.advantages"


@dataclass(frozen=True, slots=True)
class Rewarded:
    """The branches of a batch that are trained for the first time, in their order (`_B`)."""

    rewards_B: Floats
    weights_B: Floats
    """The share of its run that each branch is."""
    runs_B: Sequence[str]
    tasks_B: Sequence[str | None]

    def groups(self) -> list[str]:
        """Of each branch: its task, and for a run without one the run alone."""
        return [task or run for task, run in zip(self.tasks_B, self.runs_B, strict=True)]


Compute = Callable[[Rewarded, Baselines, Decay, "AdvantageSettings"], tuple[Advantages, Baselines]]
"""Pure, and the same everywhere (P9): advantages in the batch's order, and the baselines with the batch in them."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """One kind. `grouped`: it compares the runs of a task with each other, and needs several of them in a batch."""

    compute: Compute
    grouped: bool


def estimator(*, grouped: bool) -> Callable[[Compute], Estimator]:
    """Marks a function as an estimator and says what it needs."""
    return lambda compute: Estimator(compute, grouped)


@estimator(grouped=False)
def reinforce_pp(
    batch: Rewarded, past: Baselines, decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """REINFORCE++ with a rolling baseline."""
    return advantages.reinforce_pp(
        batch.rewards_B,
        batch.weights_B,
        batch.runs_B,
        batch.tasks_B,
        past,
        decay,
        history_min=settings.history_min,
        tasks_min=settings.tasks_min,
        scale_min=_scale_min(settings),
    )


@estimator(grouped=True)
def grpo(batch: Rewarded, past: Baselines, _decay: Decay, settings: AdvantageSettings) -> tuple[Advantages, Baselines]:
    """GRPO, with the group's standard deviation or without."""
    found = advantages.grpo(
        batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups(), scale_min=_scale_min(settings)
    )
    return found, past


@estimator(grouped=True)
def rloo(batch: Rewarded, past: Baselines, _decay: Decay, _settings: AdvantageSettings) -> tuple[Advantages, Baselines]:
    """Leave-one-out."""
    return advantages.rloo(batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups()), past


def _scale_min(settings: AdvantageSettings) -> float | None:
    return settings.scale_min if settings.scale == "std" else None


@cache
def named(kind: str) -> Estimator:
    """Looked up once in a process: batches ask for theirs again and again, and what is installed stays.

    Raises `ValueError` for a kind that nobody announces, with those there are.
    """
    announced = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in announced:
        close = difflib.get_close_matches(kind, announced, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no installed package announces {kind!r}; {hint}there are {', '.join(sorted(announced))}")
    loaded = announced[kind].load()
    if not isinstance(loaded, Estimator):
        raise ValueError(f"{announced[kind].value} is no estimator; mark it with headrace_trainer.estimators.estimator")
    return loaded
