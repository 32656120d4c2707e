"""The trainer back end `counted`: `torch` with a learner that counts the trained rows in an additional metric."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Counter

from headrace_runtime.settings.sections import Section
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.algorithms.presets import Needs
from headrace_trainer.backends import Backend
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import Abilities, Copy, Learner, StepResult

if TYPE_CHECKING:
    from headrace_trainer.settings import TrainerSettings

ROWS = Counter("headrace_counted_rows_total", "Rows that were trained")


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
