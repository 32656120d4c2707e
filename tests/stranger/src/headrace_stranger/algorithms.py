"""The algorithms `half` and `heed`, and the trainer back end `counted`, which counts the trained rows in an
additional metric.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from prometheus_client import Counter

from headrace_runtime.settings.sections import Section
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import AdvantageInputs, Reply, estimator
from headrace_trainer.algorithms.losses import Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import REPLIES, Algorithm, Needs
from headrace_trainer.algorithms.settings import AdvantageSettings
from headrace_trainer.backends import Backend
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import Abilities, Copy, Learner, StepResult

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import LossSettings
    from headrace_trainer.settings import TrainerSettings

ROWS = Counter("headrace_counted_rows_total", "Rows that were trained")


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


class CountedSettings(Section):
    """Settings in the section `[trainer.counted]`."""

    already: int = 0
    """Number of rows with which the count starts."""


class CountedLearner:
    """Learner that counts the trained rows and delegates the work to `inner`."""

    def __init__(self, inner: Learner, already: int) -> None:
        self._inner = inner
        ROWS.inc(already)

    @property
    def abilities(self) -> Abilities:
        return self._inner.abilities

    @property
    def failure(self) -> str | None:
        return self._inner.failure

    def sequence_bound(self) -> int:
        return self._inner.sequence_bound()

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        result = self._inner.step(batch, stop, from_base=from_base)
        ROWS.inc(len(batch.rows))
        return result

    def copy(self, base: str | None) -> Copy:
        return self._inner.copy(base)

    def restore(self, folder: Path, *, with_random: bool) -> None:
        self._inner.restore(folder, with_random=with_random)

    def load(self, folder: Path) -> None:
        self._inner.load(folder)

    def fingerprint_of_base(self) -> Fingerprint:
        return self._inner.fingerprint_of_base()

    def close(self) -> None:
        self._inner.close()


def _open(folder: Path, settings: TrainerSettings) -> Learner:
    from headrace_trainer.torch_learner.learner import TorchLearner

    options = settings.of("counted")
    assert isinstance(options, CountedSettings)
    learner: Learner = CountedLearner(TorchLearner.open(folder, settings), options.already)
    return learner


COUNTED = Backend(_open, offers=Needs(reference=True), settings=CountedSettings)
