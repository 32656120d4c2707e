"""Finds the experiences because of which a step fails, by steps on parts of the batch that are taken back.

The learner is left as it was before the search, random numbers included: the step on the remaining experiences is then
the step that would have been taken if the others had never been in the batch (P9).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace_runtime.isolation import TRIES, is_fatal
from headrace_runtime.logs import get_logger
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.batches.prepare import Prepared
from headrace_trainer.experiences.waiting import Waiting
from headrace_trainer.learner import Abandoned, Copy, Learner, LearnerLost, NotFinite, StepRefused, StepResult
from headrace_trainer.lineage.store import LineageStore

log = get_logger(__name__)
_LEAVE_ONE_OUT_MAX = 64
"""Experiences of the largest batch of which each is left out once, where no part of the batch fails by itself."""

Take = Callable[[Batch], StepResult]
Culprit = tuple[Waiting, Exception]


class StepFailed(Exception):
    """A step on `items` failed at every try because of `cause`, and nothing was changed."""

    def __init__(self, items: Sequence[Waiting], cause: Exception) -> None:
        super().__init__(str(cause))
        self.items = tuple(items)
        self.cause = cause


def try_step(take: Take, items: Sequence[Waiting], batch: Batch) -> StepResult:
    """Take a step, and try three times.

    Raises:
        StepFailed: Every try failed. A gradient that is not finite is not tried again: it would come out the same.
        Exception: As `Learner.step` does, where no experience is at fault.
    """
    for tries in range(1, TRIES + 1):
        try:
            return take(batch)
        except NotFinite as error:
            raise StepFailed(items, error) from error
        except Exception as error:
            if is_no_experience(error):
                raise
            log.warning("step_fails", kind=type(error).__name__, tries=tries, experiences=len(items))
            failure = error
    raise StepFailed(items, failure) from failure


def is_no_experience(error: Exception) -> bool:
    """Return whether an error of a step cannot be the fault of an experience."""
    return isinstance(error, StepRefused | Abandoned | LearnerLost | OSError) or is_fatal(error)


@dataclass(frozen=True)
class Trials:
    """Steps that are taken back. `open_trials` makes one."""

    take: Take
    ready: Callable[[Sequence[Waiting]], Prepared]
    restore: Callable[[], None]

    def find_culprits(self, failure: StepFailed) -> list[Culprit]:
        """Return the experiences without which the step does not fail, with the errors; empty when there are none.

        Halves of the batch are tried, then halves of those that fail. Where both halves succeed, each experience is
        left out once; not so where gradients are not finite, which may be the sum of all.
        """
        return self._search(failure.items, failure.cause)

    def is_learner_sound(self, known: Batch | None) -> bool:
        """Return whether the learner can take a step on `known`, a batch that it has trained, or on one of its own."""
        return self._error(known or _harmless()) is None

    def passes(self, items: Sequence[Waiting]) -> bool:
        """Return whether a step on `items` succeeds."""
        return self._try(items) is True

    def _search(self, items: Sequence[Waiting], error: Exception) -> list[Culprit]:
        if len(items) == 1:
            return [(items[0], error)]
        middle = len(items) // 2
        culprits: list[Culprit] = []
        for half in (items[:middle], items[middle:]):
            outcome = self._try(half)
            if isinstance(outcome, Exception):
                culprits += self._search(half, outcome)
        if culprits or len(items) > _LEAVE_ONE_OUT_MAX or isinstance(error, NotFinite):
            return culprits
        for index, item in enumerate(items):
            if self.passes([*items[:index], *items[index + 1 :]]):
                return [(item, error)]
        return []

    def _try(self, items: Sequence[Waiting]) -> bool | Exception:
        """Return True when a step on `items` succeeds, its error when it fails, False when there can be no such step:
        an answer that is compared, say, has to be with the other one."""
        try:
            batch = self.ready(items).batch
        except Exception as error:
            if is_no_experience(error):
                raise
            return False
        try:
            return self._error(batch) or True
        except StepRefused:
            return False

    def _error(self, batch: Batch) -> Exception | None:
        try:
            self.take(batch)
        except Exception as error:
            if is_no_experience(error):
                raise
            return error
        finally:
            self.restore()
        return None


@contextlib.contextmanager
def open_trials(
    learner: Learner,
    store: LineageStore,
    ready: Callable[[Sequence[Waiting]], Prepared],
    stop: threading.Event,
) -> Iterator[Trials]:
    """Open trials from the present weights. The caller must not have another copy of the learner."""
    copy = learner.copy(None)
    try:
        yield Trials(lambda batch: learner.step(batch, stop), ready, lambda: _restore(learner, copy, store))
    finally:
        copy.drop()


def _restore(learner: Learner, copy: Copy, store: LineageStore) -> None:
    with store.scratch() as folder:
        copy.write(folder)
        learner.restore(folder, with_random=True)


def _harmless() -> Batch:
    """Return a batch of one short row that every model can train."""
    tokens, mask = np.zeros(3, np.int32), np.array([False, True, True])
    behaviour, ones = np.where(mask, -1.0, 0.0).astype(np.float32), np.ones(3, np.float32)
    return Batch((Row("", 0, tokens, mask, behaviour, ones, np.float32(0.5), np.zeros(3, np.bool_)),))
