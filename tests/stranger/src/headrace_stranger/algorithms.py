"""The algorithms `half`, with the loss `slope`, and `heed`, which grades answers by the replies of users."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import AdvantageInputs, Reply, estimator
from headrace_trainer.algorithms.losses import Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import REPLIES, Algorithm
from headrace_trainer.algorithms.settings import AdvantageSettings

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import LossSettings


class AboveSettings(Section):
    """The section `[trainer.advantage.above]`."""

    level: float = 0.0
    """Reward whose advantage is 0."""


@estimator(settings=AboveSettings)
def above(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Return the advantages of a batch: the rewards minus a fixed level."""
    options = settings.of("above")
    assert isinstance(options, AboveSettings)
    levels_B = [options.level] * len(batch.rewards_B)
    return Advantages.of(batch.rewards_B, levels_B, [1.0] * len(levels_B)), past


HALF = Algorithm("above", "slope", {"advantage.above.level": 0.5})


def _load() -> Compute:
    import torch

    from headrace_trainer.algorithms.loss import TokenLoss

    def slope(sampled: LossInputs, _settings: LossSettings) -> TokenLoss:
        none_N = torch.zeros_like(sampled.advantage_N, dtype=torch.bool)
        left_out_N = none_N if sampled.left_out_N is None else sampled.left_out_N
        loss_N = torch.where(left_out_N, 0.0, -sampled.current_N * sampled.advantage_N)
        return TokenLoss(loss_N, torch.ones_like(sampled.advantage_N), none_N, left_out_N, none_N)

    return slope


SLOPE = Loss(_load)


class HeedSettings(Section):
    """Settings in the section `[trainer.advantage.heed]`."""

    objections: tuple[str, ...] = ("no", "wrong")
    """First words of a reply that objects to the answer."""
    praise: tuple[str, ...] = ("thanks",)
    """First words of a reply that agrees with the answer."""


def grade(replies: Sequence[Reply], settings: AdvantageSettings) -> list[float | None]:
    """Return 0 for an objection, 1 for praise, and None for any other reply."""
    options = settings.of("heed")
    assert isinstance(options, HeedSettings)
    grades = dict.fromkeys(options.objections, 0.0) | dict.fromkeys(options.praise, 1.0)
    return [grades.get(reply.text.lower().split()[0].strip(".,!")) for reply in replies]


@estimator(settings=HeedSettings, signals=REPLIES, grade=grade)
def heed(
    batch: AdvantageInputs, past: Baselines, _decay: Decay, _settings: AdvantageSettings
) -> tuple[Advantages, Baselines]:
    """Return the rewards relative to the batch. Long replies have more weight: the user took the time to write them."""
    scales_B = [1.0 if reply is None or len(reply.token_ids) > 40 else 2.0 for reply in batch.replies_B]
    return Advantages.of(batch.rewards_B, [fmean(batch.rewards_B)] * len(scales_B), scales_B), past


HEED = Algorithm("heed")
