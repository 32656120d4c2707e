"""Learner (`headrace_trainer.learner.Learner`) that wraps another learner."""

from __future__ import annotations

import threading
from pathlib import Path

from headrace_schemas.values.blobs import Fingerprint
from headrace_stranger.metrics import ROWS
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import Abilities, Copy, Learner, StepResult


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
