"""Kinds of advantages by name: the entry points `headrace.advantages` of installed packages.

The built-in kinds are announced in this package's own `pyproject.toml`. Another package can add one without a change
here: a function like those below, marked with `estimator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_runtime.registries import Registry
from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms import advantages
from headrace_trainer.algorithms.advantages import Advantages, Floats
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.needs import NOTHING, REWARDS, Needs, Signals

if TYPE_CHECKING:
    from headrace_trainer.algorithms.settings import AdvantageSettings


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The branches of a batch that are trained for the first time, in their order (`_B`)."""

    rewards_B: Floats
    weights_B: Floats
    """The share of each branch in its run."""
    runs_B: Sequence[str]
    tasks_B: Sequence[str | None]
    turns_B: Sequence[Sequence[float | None]] = ()
    """The reward of each span's turn, in the order of the spans, for each branch, or None where the turn has none."""

    def groups(self) -> list[str]:
        """Return the group of each branch: its task, or its run where it has no task."""
        return [task or run for task, run in zip(self.tasks_B, self.runs_B, strict=True)]


HISTORY_MIN = 1.0
"""Runs of a task (decayed, including others of the batch) from which on it has a baseline; before that its runs have no
advantage."""
TASKS_MIN = 16
"""Number of tasks above which tasks count as not repeating if most of them were seen once: then a task without other
runs is compared with all tasks."""
Compute = Callable[[AdvantageInputs, Baselines, Decay, "AdvantageSettings"], tuple[Advantages, Baselines]]
"""Pure, and equal on every machine (P9). It returns advantages in the batch's order, and the baselines with the batch
in them."""
Worth = Callable[[float, "AdvantageSettings"], float]
"""Maps a reward to the value that is compared. An experience with the value 0 is not trained."""
Credit = Callable[[float, Sequence[float | None], float, float, "AdvantageSettings"], tuple[float, ...]]
"""Returns the advantage of each span. Arguments: the advantage of the branch, the rewards of the spans' turns, the
baseline and the scale of turns (0 where there were no others to compare with), and the settings. It must be linear in
the first two, so that a revision can add the missing part."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """A kind of advantage. `settings` is its own section `[trainer.advantage.<name>]`, read by
    `AdvantageSettings.of(name)`."""

    compute: Compute
    needs: Needs = NOTHING
    settings: type[Section] | None = None
    signals: Signals = REWARDS
    worth: Worth | None = None
    credit: Credit | None = None
    """Set where turns have advantages of their own."""


ESTIMATORS: Registry[Estimator] = Registry("advantages", Estimator, "kind of advantage")


def estimator(
    needs: Needs = NOTHING,
    settings: type[Section] | None = None,
    *,
    signals: Signals = REWARDS,
    worth: Worth | None = None,
    credit: Credit | None = None,
) -> Callable[[Compute], Estimator]:
    """Mark a function as an estimator and declare its needs."""
    return lambda compute: Estimator(compute, needs, settings, signals, worth, credit)


def reward_as_advantage(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, _settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Return the value of each reward as its advantage, without any comparison."""
    count = len(batch.rewards_B)
    return Advantages.of(batch.rewards_B, [0.0] * count, [1.0] * count), past


@estimator()
def reinforce_pp(
    batch: AdvantageInputs, past: Baselines, decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Compute REINFORCE++ advantages with a rolling baseline."""
    return advantages.reinforce_pp(
        batch.rewards_B,
        batch.weights_B,
        batch.runs_B,
        batch.tasks_B,
        past,
        decay,
        history_min=HISTORY_MIN,
        tasks_min=TASKS_MIN,
        scale_min=scale_min(settings),
    )


@estimator(Needs(groups=True))
def grpo(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Compute GRPO advantages, with the group's standard deviation or without."""
    group_advantages = advantages.grpo(
        batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups(), scale_min=scale_min(settings)
    )
    return group_advantages, past


@estimator(Needs(groups=True))
def rloo(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, _settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Compute leave-one-out advantages."""
    return advantages.rloo(batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups()), past


def scale_min(settings: AdvantageSettings) -> float | None:
    """Return the least standard deviation to divide by, None where advantages are not divided."""
    return settings.scale_min if settings.scale == "std" else None
