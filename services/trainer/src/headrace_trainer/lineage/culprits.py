"""Evaluation of a step: combines its plan with its result, and finds the experiences that make it fail, by trial steps
on parts of the batch.

Each trial step is reverted. After the search the learner is as it was before, random numbers included: the step on the
remaining experiences is then the same as if the others had never been in the batch.

A step that ends the process, or loses the learner, is counted durably (`StepJournal`). After three of them the next
process searches for the experiences at fault, and continues the search of the process before it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace_runtime.metrics import ITEMS_FAILED
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import TRIES, is_fatal, reason_of
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.batches.prepare import PreparedBatch
from headrace_trainer.experiences.reports import TrainedExperience
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.learner import Abandoned, Copy, Learner, LearnerLost, NotFinite, StepRefused, StepResult
from headrace_trainer.lineage.step_journal import Loss, StepJournal, StepLost, trial_key
from headrace_trainer.lineage.store import LineageStore

log = get_logger(__name__)
_LEAVE_ONE_OUT_MAX = 64
"""Size of the largest batch whose experiences are left out one by one, where no part of the batch fails by itself."""

_SOUND_KEY = "trial of the learner"

TakeStep = Callable[[Batch], StepResult]
Culprit = tuple[WaitingExperience, Exception]


class StepFailed(Exception):
    """A step on `items` failed at every try with the error `cause`, and changed no weight.

    The experiences at fault are among `suspects`.
    """

    def __init__(
        self, items: Sequence[WaitingExperience], cause: Exception, suspects: Sequence[WaitingExperience] = ()
    ) -> None:
        super().__init__(str(cause))
        self.items = tuple(items)
        self.cause = cause
        self.suspects = tuple(suspects) or self.items


def check_losses(journal: StepJournal, items: Sequence[WaitingExperience]) -> None:
    """Raise `StepFailed` if three steps with the same experience of the batch `items` were lost."""
    if suspects := journal.find_suspects(items):
        loss = journal.suspect(suspects)
        log.error("steps_lost", tries=TRIES, experiences=len(suspects), reason=loss.reason)
        raise StepFailed(items, StepLost(loss.reason), suspects)


def failure_reason(error: Exception) -> str:
    """Return the reason with which an experience is dropped, because a step with it failed with `error`."""
    if isinstance(error, StepLost):
        return str(error)
    return "the gradient is not finite" if isinstance(error, NotFinite) else reason_of(error)


def leave_out(
    state: LineageState, items: Sequence[WaitingExperience], reasons: Mapping[str, str]
) -> list[WaitingExperience]:
    """Drop the experiences in `reasons`, which has their ids, as `invalid`, and return the others."""
    others = []
    for item in items:
        name = item.experience.experience_id
        if (reason := reasons.get(name)) is None:
            others.append(item)
            continue
        log.error("item_failed", step="training", item=name, kind=reason.partition(":")[0])
        ITEMS_FAILED.labels("training").inc()
        state.leave_out(item, reason)
    return others


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
    journal: StepJournal | None = None

    def isolate(self, failure: StepFailed, trained_batch: Batch | None) -> list[Culprit]:
        """Return the experiences to leave out of the batch, each with its error.

        If no single experience is at fault, these are all suspects; none if the step succeeds now, or if only the
        gradient of the whole batch is not finite.

        Args:
            failure: the failed step.
            trained_batch: the last batch that was trained, if any.

        Raises:
            Exception: the cause of `failure`; the learner cannot even take a step on `trained_batch`, or if that is
                None, on a minimal batch.
        """
        suspects, not_finite = failure.suspects, isinstance(failure.cause, NotFinite)
        if not not_finite:
            if self.succeeds(suspects):
                return []
            self._check_learner(failure, trained_batch)
        culprits = self.find_culprits(failure)
        if not_finite:
            return [] if len(culprits) == len(suspects) and not self._is_learner_sound(trained_batch) else culprits
        if not culprits and isinstance(failure.cause, StepLost) and self.succeeds(suspects):
            return []
        if len(culprits or suspects) == len(suspects) > 1:
            self._check_learner(failure, trained_batch)
        return culprits or [(item, failure.cause) for item in suspects]

    def _check_learner(self, failure: StepFailed, trained_batch: Batch | None) -> None:
        """Raise the cause of `failure` if the learner is at fault."""
        if not self._is_learner_sound(trained_batch):
            if self.journal is not None:
                self.journal.end_search(failure.suspects, {})
            raise failure.cause

    def find_culprits(self, failure: StepFailed) -> list[Culprit]:
        """Return the experiences without which the step succeeds, each with its error; empty if there are none.

        The search tries both halves of the batch, then the halves of a failing half. If both halves succeed, it leaves
        out each experience once, unless the gradient is not finite, which the sum of all experiences may cause.
        """
        return self._search(failure.suspects, failure.cause)

    def succeeds(self, items: Sequence[WaitingExperience]) -> bool:
        """Return whether a step on `items` succeeds."""
        return self._try_items(items) is True

    def _is_learner_sound(self, trained_batch: Batch | None) -> bool:
        """Return whether the learner can still take a step on `trained_batch`, or if that is None, on a minimal
        batch."""
        if self._loss(_SOUND_KEY).steps:
            return False
        with self._watch(_SOUND_KEY):
            return self._step_error(trained_batch or _harmless_batch()) is None

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
        if isinstance(error, StepLost) and self._try_items(items, TRIES) is True:
            return []  # the process was ended from outside
        for index, item in enumerate(items):
            if self.succeeds([*items[:index], *items[index + 1 :]]):
                return [(item, error)]
        return []

    def _try_items(self, items: Sequence[WaitingExperience], losses_max: int = 1) -> bool | Exception:
        """Take a trial step on `items`.

        Args:
            items: the experiences.
            losses_max: number of lost steps on `items` that count as a failure. For a single experience it is three,
                because the process may have been ended from outside.

        Returns:
            True if it succeeds; the error if it fails; False if there can be no such step, for example because an
                answer of a comparison has no counterpart.
        """
        if self.journal is None:
            return self._prepare_and_step(items)
        loss = self._loss(key := trial_key(items))
        if loss.steps >= (TRIES if len(items) == 1 else losses_max):
            return StepLost(loss.reason)
        with self._watch(key):
            return self._prepare_and_step(items)

    def _prepare_and_step(self, items: Sequence[WaitingExperience]) -> bool | Exception:
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

    def _watch(self, key: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.journal is None else self.journal.watch(key)

    def _loss(self, key: str) -> Loss:
        return Loss(0) if self.journal is None else self.journal.loss(key)

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
    journal: StepJournal,
) -> Iterator[Trials]:
    """Open a context for trial steps, each of which starts from the present weights, optimizer and random state.

    The caller must not hold another copy of the learner.
    """
    copy = learner.copy(None)
    try:
        yield Trials(lambda batch: learner.step(batch, stop), prepare, lambda: _restore(learner, copy, store), journal)
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
    return Batch((Row("trial", 0, tokens, mask, behaviour, unit_weights, np.float32(0.5), np.zeros(3, np.bool_)),))


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
