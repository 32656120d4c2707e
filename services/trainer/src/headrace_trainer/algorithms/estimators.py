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

    def groups(self) -> list[str]:
        """Of each branch: its task, and for a run without one the run alone."""
        return [task or run for task, run in zip(self.tasks_B, self.runs_B, strict=True)]


Compute = Callable[[Rewarded, Baselines, Decay, "AdvantageSettings"], tuple[Advantages, Baselines]]
"""Pure, and the same everywhere (P9): advantages in the batch's order, and the baselines with the batch in them."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """One kind. `settings` are its own: the section `[trainer.advantage.<name>]`, `AdvantageSettings.of(name)`."""

    compute: Compute
    needs: Needs = NOTHING
    settings: type[Section] | None = None


ESTIMATORS: Registry[Estimator] = Registry("advantages", Estimator, "kind of advantage")


def estimator(needs: Needs = NOTHING, settings: type[Section] | None = None) -> Callable[[Compute], Estimator]:
    """Marks a function as an estimator and says what it needs."""
    return lambda compute: Estimator(compute, needs, settings)


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
        scale_min=_scale_min(settings),
    )


@estimator(Needs(groups=True))
def grpo(batch: Rewarded, past: Baselines, _decay: Decay, settings: AdvantageSettings) -> tuple[Advantages, Baselines]:
    """GRPO, with the group's standard deviation or without."""
    found = advantages.grpo(
        batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups(), scale_min=_scale_min(settings)
    )
    return found, past


@estimator(Needs(groups=True))
def rloo(batch: Rewarded, past: Baselines, _decay: Decay, _settings: AdvantageSettings) -> tuple[Advantages, Baselines]:
    """Leave-one-out."""
    return advantages.rloo(batch.rewards_B, batch.weights_B, batch.runs_B, batch.groups()), past


def _scale_min(settings: AdvantageSettings) -> float | None:
    return settings.scale_min if settings.scale == "std" else None
