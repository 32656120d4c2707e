"""Kinds of advantages by name: whatever an installed package announces under the entry points `headrace.advantages`.

Ours are announced in this package's own `pyproject.toml`. Another package adds one without a change here: a function
like those below, marked with `estimator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_runtime.registries import Registry
from headrace_runtime.settings import Section
from headrace_trainer.algorithms import advantages
from headrace_trainer.algorithms.advantages import Advantages, Floats
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.needs import NOTHING, Needs
from headrace_trainer.algorithms.signals import REWARDS, Signals

if TYPE_CHECKING:
    from headrace_trainer.algorithms.settings import AdvantageSettings


@dataclass(frozen=True, slots=True)
class Rewarded:
    """The branches of a batch that are trained for the first time, in their order (`_B`)."""

    rewards_B: Floats
    weights_B: Floats
    """The share of its run that each branch is."""
    runs_B: Sequence[str]
    tasks_B: Sequence[str | None]
    turns_B: Sequence[Sequence[float | None]] = ()
    """Of each branch its spans, in order, each with the reward of its turn; None where the turn has none."""

    def groups(self) -> list[str]:
        """Of each branch: its task, and for a run without one the run alone."""
        return [task or run for task, run in zip(self.tasks_B, self.runs_B, strict=True)]


Compute = Callable[[Rewarded, Baselines, Decay, "AdvantageSettings"], tuple[Advantages, Baselines]]
"""Pure, and the same everywhere (P9): advantages in the batch's order, and the baselines with the batch in them."""
Worth = Callable[[float, "AdvantageSettings"], float]
"""What a reward counts as before it is compared. 0: nothing of the experience is trained."""
Credit = Callable[[float, Sequence[float | None], float, float, "AdvantageSettings"], tuple[float, ...]]
"""The advantage of each span: from that of the branch, the rewards of the spans' turns, and the baseline and scale of
turns, which is 0 where there was nothing to compare them with. Linear in the first two, so that a revision can add what
is missing."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """One kind. `settings` are its own: the section `[trainer.advantage.<name>]`, `AdvantageSettings.of(name)`."""

    compute: Compute
    needs: Needs = NOTHING
    settings: type[Section] | None = None
    signals: Signals = REWARDS
    worth: Worth | None = None
    credit: Credit | None = None
    """Where turns have advantages of their own."""


ESTIMATORS: Registry[Estimator] = Registry("advantages", Estimator, "kind of advantage")


def estimator(
    needs: Needs = NOTHING,
    settings: type[Section] | None = None,
    *,
    signals: Signals = REWARDS,
    worth: Worth | None = None,
    credit: Credit | None = None,
) -> Callable[[Compute], Estimator]:
    """Marks a function as an estimator and says what it needs."""
    return lambda compute: Estimator(compute, needs, settings, signals, worth, credit)


def as_they_are(
    batch: Rewarded, past: Baselines, _decay: Decay, _settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """What rewards count as is the advantage: they are compared with nothing."""
    count = len(batch.rewards_B)
    return Advantages.of(batch.rewards_B, [0.0] * count, [1.0] * count), past


@estimator()
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
        scale_min=scale_min(settings),
    )


@estimator(Needs(groups=True))
def grpo(batch: Rewarded, past: Baselines, _decay: Decay, settings: AdvantageSettings) -> tuple[Advantages, Baselines]:
    """GRPO, with the group's standard deviation or without."""
    found = advantages.grpo(
        batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups(), scale_min=scale_min(settings)
    )
    return found, past


@estimator(Needs(groups=True))
def rloo(batch: Rewarded, past: Baselines, _decay: Decay, _settings: AdvantageSettings) -> tuple[Advantages, Baselines]:
    """Leave-one-out."""
    return advantages.rloo(batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups()), past


def scale_min(settings: AdvantageSettings) -> float | None:
    """The least standard deviation to divide by; None: nothing is divided."""
    return settings.scale_min if settings.scale == "std" else None
