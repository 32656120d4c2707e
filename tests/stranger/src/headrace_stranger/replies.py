"""The algorithm `heed`: an answer is as good as the user's reply to it, compared with the others of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import AdvantageInputs, Reply, estimator
from headrace_trainer.algorithms.needs import REPLIES
from headrace_trainer.algorithms.presets import Algorithm
from headrace_trainer.algorithms.settings import AdvantageSettings


class HeedSettings(Section):
    """The section `[trainer.advantage.heed]`."""

    objections: tuple[str, ...] = ("no", "wrong")
    """Words with which a reply that objects begins."""
    praise: tuple[str, ...] = ("thanks",)
    """Words with which a reply that agrees begins."""


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
    """Long replies count more: the user took the time to write them."""
    scales_B = [1.0 if reply is None or len(reply.token_ids) > 40 else 2.0 for reply in batch.replies_B]
    return Advantages.of(batch.rewards_B, [fmean(batch.rewards_B)] * len(scales_B), scales_B), past


HEED = Algorithm("heed")
