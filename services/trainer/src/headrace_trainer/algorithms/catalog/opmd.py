"""`opmd`: online policy mirror descent, in the form that Trinity-RFT has it (arXiv:2505.17826, "OPMD: a simple
variant").

    A = r - b,    b = mean of the group,  or  tau log(mean of exp(r / tau))
    L = - 1/N sum_n A log pi / (1 + tau)

Needs groups, and nobody's logprobs: there is no ratio. A revision is trained with the advantage that is missing, by the
baseline of the first training.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from headrace_runtime.settings import Section
from headrace_trainer.algorithms.advantages import Advantages, run_means
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.catalog.sft import LATE
from headrace_trainer.algorithms.estimators import Rewarded, estimator
from headrace_trainer.algorithms.losses import Compute, Loss, Sampled
from headrace_trainer.algorithms.needs import Needs
from headrace_trainer.algorithms.presets import Algorithm

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings


class BaselineSettings(Section):
    """`[trainer.advantage.opmd]`."""

    baseline: Literal["mean", "logavgexp"] = "mean"
    """What runs of a group are compared with: their mean, or the softer maximum of the formula."""
    tau: Annotated[float, Field(gt=0)] = 1.0
    """Of the softer maximum: the smaller, the nearer to the group's best run."""


class OpmdSettings(Section):
    """`[trainer.loss.opmd]`."""

    tau: Annotated[float, Field(ge=0)] = 1.0
    """The regularization: the loss is divided by 1 + tau."""


@estimator(Needs(groups=True), BaselineSettings)
def opmd(batch: Rewarded, past: Baselines, _decay: Decay, settings: AdvantageSettings) -> tuple[Advantages, Baselines]:
    """The baseline is the group's, its own run included."""
    own = settings.of("opmd")
    assert isinstance(own, BaselineSettings)
    groups_B = batch.groups()
    groups = run_means(batch.rewards_B, batch.weights_B, batch.runs_B, groups_B)
    baselines = {name: _baseline(list(runs.values()), own) for name, runs in groups.items()}
    ones_B = [1.0] * len(groups_B)
    return Advantages.of(batch.rewards_B, [baselines[group] for group in groups_B], ones_B), past


def _baseline(rewards: list[float], own: BaselineSettings) -> float:
    if own.baseline == "mean":
        return fmean(rewards)
    top = max(rewards)  # so that no exponential overflows
    return top + own.tau * math.log(fmean(math.exp((reward - top) / own.tau) for reward in rewards))


def _load() -> Compute:
    from headrace_trainer.algorithms.loss import plain

    def loss(sampled: Sampled, settings: LossSettings) -> TokenLoss:
        own = settings.of("opmd")
        assert isinstance(own, OpmdSettings)
        return plain(-sampled.advantage_N * sampled.current_N / (1 + own.tau), sampled)

    return loss


LOSS = Loss(_load, settings=OpmdSettings, by_token=True)
OPMD = Algorithm("opmd", "opmd", LATE)
