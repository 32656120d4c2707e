"""`opmd`: online policy mirror descent, in the form of Trinity-RFT (arXiv:2505.17826, "OPMD: a simple variant").

    A = r - b,    b = mean of the group,  or  tau log(mean of exp(r / tau))
    L = - 1/N sum_n A log pi / (1 + tau)

Needs groups, and no logprobs: there is no ratio. A revision is trained with the missing advantage, by the baseline of
the first training.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.advantages import Advantages, run_means
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.catalog.sft import LATE
from headrace_trainer.algorithms.estimators import AdvantageInputs, estimator
from headrace_trainer.algorithms.losses import Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import Algorithm, Needs

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings


class BaselineSettings(Section):
    """Settings of the baseline of `opmd`, `[trainer.advantage.opmd]`."""

    baseline: Literal["mean", "logavgexp"] = "mean"
    """The baseline of a group: the mean of its runs, or the softer maximum of the formula."""
    tau: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the softer maximum: the smaller, the nearer to the group's best run."""


class OpmdSettings(Section):
    """Settings of the loss of `opmd`, `[trainer.loss.opmd]`."""

    tau: Annotated[float, Field(ge=0)] = 1.0
    """The regularization: the loss is divided by 1 + tau."""


@estimator(Needs(groups=True), BaselineSettings)
def opmd(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Compute advantages against the group's baseline, which includes the own run."""
    section = settings.of("opmd")
    assert isinstance(section, BaselineSettings)
    groups_B = batch.groups()
    groups = run_means(batch.rewards_B, batch.weights_B, batch.runs_B, groups_B)
    baselines = {name: _baseline(list(runs.values()), section) for name, runs in groups.items()}
    ones_B = [1.0] * len(groups_B)
    return Advantages.of(batch.rewards_B, [baselines[group] for group in groups_B], ones_B), past


def _baseline(rewards: list[float], section: BaselineSettings) -> float:
    if section.baseline == "mean":
        return fmean(rewards)
    top = max(rewards)  # subtracted first, so that no exponential overflows
    return top + section.tau * math.log(fmean(math.exp((reward - top) / section.tau) for reward in rewards))


def _load() -> Compute:
    from headrace_trainer.algorithms.loss import plain

    def loss(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
        options = settings.of("opmd")
        assert isinstance(options, OpmdSettings)
        return plain(-sampled.advantage_N * sampled.current_N / (1 + options.tau), sampled)

    return loss


LOSS = Loss(_load, settings=OpmdSettings, by_token=True)
OPMD = Algorithm("opmd", "opmd", LATE)
