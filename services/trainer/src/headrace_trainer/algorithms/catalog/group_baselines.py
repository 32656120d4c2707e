"""Algorithms with advantages of their own within a group: `opmd` and `multi_step_grpo`.

`opmd`: online policy mirror descent, in the form of Trinity-RFT (arXiv:2505.17826, "OPMD: a simple variant").

    A = r - b,    b = mean of the group,  or  tau log(mean of exp(r / tau))
    L = - 1/N sum_n A log pi / (1 + tau)

Needs groups, and no logprobs: there is no ratio. A revision is trained with the missing advantage, by the baseline of
the first training.

`multi_step_grpo`: step-wise GRPO: all turns get the run's advantage, and each turn the gain of its own reward.

    A_run = (r - mean of the group) / (standard deviation + 1e-6),        divided by the run's turns with `step_norm`
    A_k   = A_run + turn_weight * sum over j >= k of turn_decay^(j - k) (u_j - mean of u) / (deviation of u + 1e-6)

r is the reward of a run, u_j that of its turn j (`Experience.turn_rewards`); mean and deviation of u are over all turns
of the group's runs that have one. The first line is `step_wise_grpo` of Trinity-RFT, the second the process supervision
of GRPO (arXiv:2402.03300, section 4.1.3), which sums over the turns from this one on, in its branch. A turn without a
reward adds no term, which differs from a reward of 0. Needs groups and turn rewards; without turn rewards it is `grpo`.

Both lines are linear in the rewards, so a revision of either is trained with the missing advantage of each turn, by the
means and deviations of the first training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms import advantages
from headrace_trainer.algorithms.advantages import EPSILON, Advantages, run_means
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.catalog.imitation import LATE
from headrace_trainer.algorithms.estimators import AdvantageInputs, estimator, scale_min
from headrace_trainer.algorithms.losses import Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import Algorithm, Needs

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings


class BaselineSettings(Section):
    """Constants of the baseline of `opmd`."""

    PARAMETERS: ClassVar = ("baseline", "tau")

    baseline: Literal["mean", "logavgexp"] = "mean"
    """The baseline of a group: the mean of its runs, or the softer maximum of the formula."""
    tau: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the softer maximum: the smaller, the nearer to the group's best run. 1 as in Trinity-RFT."""


class OpmdSettings(Section):
    """Constants of the loss of `opmd`."""

    PARAMETERS: ClassVar = ("tau",)

    tau: Annotated[float, Field(ge=0)] = 1.0
    """The regularization: the loss is divided by 1 + tau, which the learning rate can do, too."""


@estimator(Needs(groups=True), BaselineSettings)
def opmd(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Compute advantages as rewards minus the baseline of the task's group of runs; the group includes the run
    itself.
    """
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


def _load_opmd() -> Compute:
    from headrace_trainer.algorithms.loss import unweighted_loss

    def loss(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
        options = settings.of("opmd")
        assert isinstance(options, OpmdSettings)
        return unweighted_loss(-sampled.advantage_N * sampled.current_N / (1 + options.tau), sampled)

    return loss


OPMD_LOSS = Loss(_load_opmd, settings=OpmdSettings, by_token=True)
OPMD = Algorithm("opmd", "opmd", LATE)


class StepWiseSettings(Section):
    """Settings of step-wise GRPO, `[trainer.advantage.step_wise_grpo]`."""

    PARAMETERS: ClassVar = ("step_norm", "turn_weight")

    step_norm: bool = False
    """Divide a run's advantage by the number of its turns, so that a long run weighs no more than a short one. Off,
    as in Trinity-RFT."""
    turn_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the rewards of turns relative to that of the run: both are in standard deviations."""
    turn_decay: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of a later turn's reward for the turn before it. 0: a turn gets its own reward alone."""


def _section(settings: AdvantageSettings) -> StepWiseSettings:
    section = settings.of("step_wise_grpo")
    assert isinstance(section, StepWiseSettings)
    return section


def credit(
    advantage: float, turns_S: Sequence[float | None], baseline: float, scale: float, settings: AdvantageSettings
) -> tuple[float, ...]:
    """Return the advantage of each span of sampled tokens: A_k in the formula of this module for the span's turn k.

    Args:
        advantage: advantage of the run.
        turns_S: reward of the turn that begins at each span, None elsewhere.
        baseline: mean of the group's turn rewards.
        scale: standard deviation of the group's turn rewards.
    """
    section, to_go, advantages_S = _section(settings), 0.0, []
    for value in reversed(turns_S):
        gain = 0.0 if value is None or scale == 0.0 else (value - baseline) / scale
        to_go = gain + section.turn_decay * to_go
        advantages_S.append(advantage + section.turn_weight * to_go)
    return tuple(reversed(advantages_S))


@estimator(Needs(groups=True, turn_rewards=True), StepWiseSettings, credit=credit)
def step_wise_grpo(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Compute `grpo` advantages of the runs, and mean and standard deviation of turn rewards for `credit`."""
    least, groups_B = scale_min(settings), batch.groups()
    group_advantages = advantages.grpo(batch.rewards_B, batch.weights_B, batch.runs_B, groups_B, scale_min=least)
    if _section(settings).step_norm:
        turns: dict[str, int] = {}
        for run, turns_S in zip(batch.runs_B, batch.turns_B, strict=True):
            turns[run] = turns.get(run, 0) + len(turns_S)
        scales_B = [scale * turns[run] for scale, run in zip(group_advantages.scales_B, batch.runs_B, strict=True)]
        group_advantages = Advantages.of(batch.rewards_B, group_advantages.baselines_B, scales_B)
    rewards_by_group: dict[str, list[float]] = {}
    for group, turns_S in zip(groups_B, batch.turns_B, strict=True):
        rewards_by_group.setdefault(group, []).extend(value for value in turns_S if value is not None)
    means = {group: fmean(values) if values else 0.0 for group, values in rewards_by_group.items()}
    spreads = {group: _spread(values, least) for group, values in rewards_by_group.items()}
    return replace(
        group_advantages,
        turn_baselines_B=[means[group] for group in groups_B],
        turn_scales_B=[spreads[group] for group in groups_B],
    ), past


def _spread(values: Sequence[float], least: float | None) -> float:
    """Return the divisor of turn rewards: their standard deviation, at least `least`, plus `EPSILON`.

    It is 0 for fewer than two rewards, and 1 if `least` is None, which turns scaling off.
    """
    if len(values) < 2:
        return 0.0
    return 1.0 if least is None else max(stdev(values), least) + EPSILON


MULTI_STEP_GRPO = Algorithm("step_wise_grpo", "clipped")
