"""`multi_step_grpo`: step-wise GRPO: the run's advantage for all its turns, and to each turn what its own reward adds.

    A_run = (r - mean of the group) / (standard deviation + 1e-6),        divided by the run's turns with `step_norm`
    A_k   = A_run + turn_weight * sum over j >= k of turn_decay^(j - k) (u_j - mean of u) / (deviation of u + 1e-6)

r is the reward of a run, u_j that of its turn j (`Experience.turn_rewards`); mean and deviation of u are over all turns
of the group's runs that have one. The first line is `step_wise_grpo` of Trinity-RFT, the second the process supervision
of GRPO (arXiv:2402.03300, section 4.1.3), which sums over the turns from this one on, in its branch. A turn without a
reward adds nothing: that is no zero. Needs groups and turn rewards; without any of the latter it is `grpo`.

Both lines are linear in the rewards, so a revision of either is trained with what is missing in each turn, by the means
and deviations of the first training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from headrace_runtime.settings import Section
from headrace_trainer.algorithms import advantages
from headrace_trainer.algorithms.advantages import EPSILON, Advantages
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import Rewarded, estimator, scale_min
from headrace_trainer.algorithms.needs import Needs
from headrace_trainer.algorithms.presets import Algorithm

if TYPE_CHECKING:
    from headrace_trainer.algorithms.settings import AdvantageSettings


class StepWiseSettings(Section):
    """`[trainer.advantage.step_wise_grpo]`."""

    step_norm: bool = False
    """Divide a run's advantage by its turns, so that a long run weighs no more than a short one."""
    turn_weight: Annotated[float, Field(ge=0)] = 1.0
    """What the rewards of turns count beside that of the run."""
    turn_decay: Annotated[float, Field(ge=0, le=1)] = 1.0
    """What a later turn's reward counts for the turn before it."""


def _own(settings: AdvantageSettings) -> StepWiseSettings:
    own = settings.of("step_wise_grpo")
    assert isinstance(own, StepWiseSettings)
    return own


def credit(
    advantage: float, turns_S: Sequence[float | None], baseline: float, scale: float, settings: AdvantageSettings
) -> tuple[float, ...]:
    """The advantage of each span, A_k."""
    own, to_go, found_S = _own(settings), 0.0, []
    for value in reversed(turns_S):
        here = 0.0 if value is None or scale == 0.0 else (value - baseline) / scale
        to_go = here + own.turn_decay * to_go
        found_S.append(advantage + own.turn_weight * to_go)
    return tuple(reversed(found_S))


@estimator(Needs(groups=True, turn_rewards=True), StepWiseSettings, credit=credit)
def step_wise_grpo(
    batch: Rewarded, past: Baselines, _decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """`grpo` for the runs; for turns the mean and the deviation that `credit` takes."""
    least, groups_B = scale_min(settings), batch.groups()
    found = advantages.grpo(batch.rewards_B, batch.weights_B, batch.runs_B, groups_B, scale_min=least)
    if _own(settings).step_norm:
        turns: dict[str, int] = {}
        for run, turns_S in zip(batch.runs_B, batch.turns_B, strict=True):
            turns[run] = turns.get(run, 0) + len(turns_S)
        scales_B = [scale * turns[run] for scale, run in zip(found.scales_B, batch.runs_B, strict=True)]
        found = Advantages.of(batch.rewards_B, found.baselines_B, scales_B)
    stated: dict[str, list[float]] = {}
    for group, turns_S in zip(groups_B, batch.turns_B, strict=True):
        stated.setdefault(group, []).extend(value for value in turns_S if value is not None)
    means = {group: fmean(values) if values else 0.0 for group, values in stated.items()}
    spreads = {group: _spread(values, least) for group, values in stated.items()}
    return replace(
        found,
        turn_baselines_B=[means[group] for group in groups_B],
        turn_scales_B=[spreads[group] for group in groups_B],
    ), past


def _spread(values: Sequence[float], least: float | None) -> float:
    """0: there is nothing to compare with."""
    if len(values) < 2:
        return 0.0
    return 1.0 if least is None else max(stdev(values), least) + EPSILON


MULTI_STEP_GRPO = Algorithm("step_wise_grpo", "clipped")
