"""The algorithm `heed`: an answer is graded by the user's reply to it, relative to the batch."""

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
    """Return the advantages of a batch. Long replies have more weight, because the user took the time to write them."""
    scales_B = [1.0 if reply is None or len(reply.token_ids) > 40 else 2.0 for reply in batch.replies_B]
    return Advantages.of(batch.rewards_B, [fmean(batch.rewards_B)] * len(scales_B), scales_B), past


HEED = Algorithm("heed")
