"""`rft`: reward-filtered fine-tuning, also called rejection sampling or RAFT (arXiv:2304.06767).

    L = - 1/N sum_n 1[r >= reward_min] log pi(n)

Needs rewards. An experience below `reward_min` is not trained (`no_signal`). A revision that crosses the bound trains
the experience with an advantage of 1, or reverses it with -1: the loss is linear in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.catalog.sft import LATE
from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.presets import Algorithm

if TYPE_CHECKING:
    from headrace_trainer.algorithms.settings import AdvantageSettings


class RftSettings(Section):
    """`[trainer.advantage.rft]`."""

    reward_min: float = 0.5
    """Runs with a lower reward are not trained."""


def _worth(reward: float, settings: AdvantageSettings) -> float:
    section = settings.of("rft")
    assert isinstance(section, RftSettings)
    return float(reward >= section.reward_min)


filtered = estimator(settings=RftSettings, worth=_worth)(reward_as_advantage)
RFT = Algorithm("rft", "likelihood", LATE)
