"""The algorithm `half`: the loss `slope`, with advantages that are the reward minus a fixed level."""

from __future__ import annotations

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import AdvantageInputs, estimator
from headrace_trainer.algorithms.presets import Algorithm
from headrace_trainer.algorithms.settings import AdvantageSettings


class AboveSettings(Section):
    """The section `[trainer.advantage.above]`."""

    level: float = 0.0
    """Reward whose advantage is 0."""


@estimator(settings=AboveSettings)
def above(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    options = settings.of("above")
    assert isinstance(options, AboveSettings)
    levels_B = [options.level] * len(batch.rewards_B)
    return Advantages.of(batch.rewards_B, levels_B, [1.0] * len(levels_B)), past


HALF = Algorithm("above", "slope", {"advantage.above.level": 0.5})
