"""Evaluation of a step: combines its plan with its result, and finds the experiences that make it fail, by trial steps
on parts of the batch.

Each trial step is reverted. After the search the learner is as it was before, random numbers included: the step on the
remaining experiences is then the same as if the others had never been in the batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import TRIES, is_fatal
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.batches.prepare import PreparedBatch
from headrace_trainer.experiences.reports import TrainedExperience
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.learner import Abandoned, Copy, Learner, LearnerLost, NotFinite, StepRefused, StepResult
from headrace_trainer.lineage.store import LineageStore

log = get_logger(__name__)
_LEAVE_ONE_OUT_MAX = 64
"""Size of the largest batch whose experiences are left out one by one, where no part of the batch fails by itself."""

TakeStep = Callable[[Batch], StepResult]
Culprit = tuple[WaitingExperience, Exception]


class StepFailed(Exception):
    """A step on `items` failed at every try with the error `cause`, and changed no weight."""

    def __init__(self, items: Sequence[WaitingExperience], cause: Exception) -> None:
        super().__init__(str(cause))
        self.items = tuple(items)
        self.cause = cause


def try_step(take: TakeStep, items: Sequence[WaitingExperience], batch: Batch) -> StepResult:
    """Take a step, with up to three tries.

    Raises:
        StepFailed: every try failed. A step whose gradient is not finite is not repeated: the result would be equal.
        LearnerLost: memory did not suffice at any try.
        Exception: an error for which no experience is at fault, as `Learner.step` raises it.
    """
    for tries in range(1, TRIES + 1):
        try:
            return take(batch)
        except NotFinite as error:
            raise StepFailed(items, error) from error
        except Exception as error:
            if is_other_cause(error) and not isinstance(error, MemoryError):
                raise
            log.warning("step_fails", kind=type(error).__name__, tries=tries, experiences=len(items))
            failure = error
    if isinstance(failure, MemoryError):
        raise LearnerLost(f"memory does not suffice for a step: {failure}") from failure
    raise StepFailed(items, failure) from failure


def is_other_cause(error: Exception) -> bool:
    """Return whether a step failed for a cause other than its experiences, for example because memory ran out.

    Memory does not depend on them: each admitted experience fits into the memory that was free at the start.
    """
    return isinstance(error, StepRefused | Abandoned | LearnerLost | OSError | MemoryError) or is_fatal(error)


@dataclass(frozen=True)
class Trials:
    """Trial steps on parts of a batch, which are reverted. Use `open_trials` to create one."""

    take: TakeStep
    prepare: Callable[[Sequence[WaitingExperience]], PreparedBatch]
    restore: Callable[[], None]

    def find_culprits(self, failure: StepFailed) -> list[Culprit]:
        """Return the experiences without which the step succeeds, each with its error; empty if there are none.

        The search tries both halves of the batch, then the halves of a failing half. If both halves succeed, it leaves
        out each experience once, unless the gradient is not finite, which the sum of all experiences may cause.
        """
        return self._search(failure.items, failure.cause)

    def is_learner_sound(self, trained_batch: Batch | None) -> bool:
        """Return whether the learner can still take a step on `trained_batch`, or if that is None, on a minimal
        batch."""
        return self._step_error(trained_batch or _harmless_batch()) is None

    def succeeds(self, items: Sequence[WaitingExperience]) -> bool:
        """Return whether a step on `items` succeeds."""
        return self._try_items(items) is True

    def _search(self, items: Sequence[WaitingExperience], error: Exception) -> list[Culprit]:
        if len(items) == 1:
            return [(items[0], error)]
        middle = len(items) // 2
        culprits: list[Culprit] = []
        for half in (items[:middle], items[middle:]):
            outcome = self._try_items(half)
            if isinstance(outcome, Exception):
                culprits += self._search(half, outcome)
        if culprits or len(items) > _LEAVE_ONE_OUT_MAX or isinstance(error, NotFinite):
            return culprits
        for index, item in enumerate(items):
            if self.succeeds([*items[:index], *items[index + 1 :]]):
                return [(item, error)]
        return []

    def _try_items(self, items: Sequence[WaitingExperience]) -> bool | Exception:
        """Take a trial step on `items`.

        Returns:
            True if it succeeds; the error if it fails; False if there can be no such step, for example because an
                answer of a comparison has no counterpart.
        """
        try:
            batch = self.prepare(items).batch
        except Exception as error:
            if is_other_cause(error):
                raise
            return False
        try:
            return self._step_error(batch) or True
        except StepRefused:
            return False

    def _step_error(self, batch: Batch) -> Exception | None:
        try:
            self.take(batch)
        except Exception as error:
            if is_other_cause(error):
                raise
            return error
        finally:
            self.restore()
        return None


@contextlib.contextmanager
def open_trials(
    learner: Learner,
    store: LineageStore,
    prepare: Callable[[Sequence[WaitingExperience]], PreparedBatch],
    stop: threading.Event,
) -> Iterator[Trials]:
    """Open a context for trial steps, each of which starts from the present weights, optimizer and random state.

    The caller must not hold another copy of the learner.
    """
    copy = learner.copy(None)
    try:
        yield Trials(lambda batch: learner.step(batch, stop), prepare, lambda: _restore(learner, copy, store))
    finally:
        copy.drop()


def _restore(learner: Learner, copy: Copy, store: LineageStore) -> None:
    with store.scratch() as folder:
        copy.write(folder)
        learner.restore(folder, with_random=True)


def _harmless_batch() -> Batch:
    """Return a batch with one short row that every model can train."""
    tokens, mask = np.zeros(3, np.int32), np.array([False, True, True])
    behaviour, unit_weights = np.where(mask, -1.0, 0.0).astype(np.float32), np.ones(3, np.float32)
    return Batch((Row("", 0, tokens, mask, behaviour, unit_weights, np.float32(0.5), np.zeros(3, np.bool_)),))


def apply_result(prepared: PreparedBatch, result: StepResult, *, has_teacher: bool = False) -> list[TrainedExperience]:
    """Return a record of each example of a batch, with the advantage that the step used for it.

    If its reward is revised later, a correction trains the difference to this advantage. An example that the loss left
    out has the advantage 0. An advantage that a critic computed replaces the one of the batch.

    Args:
        prepared: plan of the step.
        result: result of the step.
        has_teacher: whether a teacher computed the advantages of the tokens of all new rows.
    """
    records = []
    for planned, row in zip(prepared.trained, prepared.batch.rows, strict=True):
        name = row.name
        by_teacher = (has_teacher and not row.correction) or row.hindsight is not None
        record = replace(
            planned,
            factor=prepared.batch.weight_factor(row) * result.slopes.get(name, 1.0),
            loss_advantage=None if by_teacher else float(row.advantage),
        )
        if name in result.advantages and not row.correction:
            advantage = result.advantages[name]
            record = replace(
                record,
                advantage=advantage,
                loss_advantage=advantage,
                baseline=float(row.advantage) - advantage,
                scale=1.0,
                reestimated=True,
            )
        if name in result.left_out:
            record = replace(record, advantage=0.0, loss_advantage=0.0, turns=tuple(0.0 for _ in record.turns))
        records.append(record)
    return records
