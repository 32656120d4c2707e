"""A lineage: weights, optimizer and state, and the operations on them. Independent of the bus and the event loop.

`open_lineage` (in `opening`) loads the state that was saved last, or begins from the base. After that, experiences are
admitted one by one, a step is taken when `next_batch` has a batch, and `save` makes all of it durable at once. If the
process dies, the next one continues from the last save. A `Learner` holds weights and optimizer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

from headrace_runtime.clock import Clock
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import versions as files
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import ModelEvent
from headrace_schemas.values.blobs import Manifest
from headrace_trainer.batches import summary
from headrace_trainer.batches.batch import Batch
from headrace_trainer.batches.cutting import BEGINNING_OF_TIME, END_OF_TIME, Cutter, decay
from headrace_trainer.batches.prepare import PreparedBatch, prepare, prepare_isolated
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.learner import GRADIENT_FACTOR, Learner, LearnerLost, NotFinite, StepRefused
from headrace_trainer.lineage import control, versions
from headrace_trainer.lineage.culprits import (
    StepFailed,
    apply_result,
    check_losses,
    failure_reason,
    leave_out,
    open_trials,
    try_step,
)
from headrace_trainer.lineage.saved import SavedState
from headrace_trainer.lineage.saving import LineageResources, LineageSnapshot, Save
from headrace_trainer.lineage.step_journal import StepJournal
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.metrics import NOT_FINITE, REWINDS
from headrace_trainer.settings import TrainerSettings

log = get_logger(__name__)
OUTCOMES_PER_SAVE = 4096
"""Training outcomes, or ranges of records read, that cause a save. An account lists them all (`LISTED_MAX`)."""
_SAVE_INTERVAL_S, _SAVE_INTERVAL_S_MAX = 30.0, 1800.0
_SAVE_BYTES_PER_S = 1_000_000
"""Mean rate at which saves between versions may write, without a setting."""


class Lineage:
    """A lineage that is open for training.

    It is not safe for concurrent use: the owner makes one call at a time. `step`, `save` and `control` block.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        clock: Clock,
        blobs: BlobStore,
        store: LineageStore,
        first: Manifest,
        learner: Learner,
        state: LineageState,
        saved: SavedState,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._blobs = blobs
        self._store = store
        self._first = first
        self.learner = learner
        self.state = state
        self.saved = saved
        """The state that is durable."""
        self.health = saved.health
        self._measured: list[Mapping[str, float]] = []
        self._tensors_moved = False
        self._differs_from_head = saved.differs_from_head
        """Whether a step has changed the weights since the version that they descend from."""
        self._steps_saved = saved.steps
        self._decay = decay(settings)
        self._cutter = Cutter(settings)
        self.recorded_left_out: frozenset[str] = frozenset()
        """Experiences that the original of a replay left out of the batches that are cut now."""
        self._trained_batch: Batch | None = None
        """The last batch that was trained."""
        self._journal = StepJournal(blobs, settings.lineage, saved.steps)
        self._undecided = 0
        """Number of experiences of the last step that was refused because they were too few. It is not saved: the next
        process measures the same for them."""

    @property
    def is_version_due(self) -> bool:
        """Whether enough steps were taken to publish the next version."""
        enough_steps = self.state.steps - self.state.history.head_step >= self._settings.steps_per_version
        return enough_steps and self.has_unpublished_steps

    @property
    def has_unpublished_steps(self) -> bool:
        """Whether steps have changed the weights since the last version, and they are healthy enough to be
        published."""
        return self.state.current is None and self._differs_from_head and not self.health.doubtful

    @property
    def save_bytes(self) -> int:
        """Estimated size of the next save in bytes: weights, optimizer, and the weights again as a version."""
        return 2 * self.saved.present.weights.size + self.saved.present.optimizer.size

    def is_save_due(self, since_s: float) -> bool:
        """Return whether to save now, `since_s` seconds after the last save.

        A save is due if a version is due, `OUTCOMES_PER_SAVE` outcomes are unsaved, or the save interval has passed.
        """
        stepped, outcomes = self.state.steps != self._steps_saved, len(self.state.outcomes)
        if stepped and self.is_version_due:
            return True
        late = since_s >= self._save_interval_s(stepped=stepped)
        full = max(outcomes, len(self.state.read)) >= OUTCOMES_PER_SAVE
        return full or (late and (stepped or outcomes > 0))

    def _save_interval_s(self, *, stepped: bool) -> float:
        """Return the seconds between two saves without a version.

        Args:
            stepped: whether there were steps, so that weights and optimizer are saved, too.
        """
        if self._settings.save_interval_s is not None:
            return self._settings.save_interval_s
        present = self.saved.present
        written = present.weights.size + present.optimizer.size if stepped else 0
        return min(max(_SAVE_INTERVAL_S, written / _SAVE_BYTES_PER_S), _SAVE_INTERVAL_S_MAX)

    def is_finished(self) -> bool:
        """Return whether the lineage has taken all `max_steps` steps. It can change only with a step."""
        return self._settings.max_steps is not None and self.state.steps >= self._settings.max_steps

    def next_batch(self, recorded_size: int | None = None, *, at_end: bool = False) -> tuple[WaitingExperience, ...]:
        """Return the batch to train now, empty if no batch is complete or training is stopped; see `Cutter.next`.

        Args:
            recorded_size: in a replay, the size of the batch that the original formed after the record just read.
            at_end: whether no more experiences will arrive.
        """
        if self.health.stopped is not None:
            return ()
        if at_end:
            return self._cutter.next_batch(self.state, END_OF_TIME, recorded_size, self._undecided)
        # A recording is complete from the start. Without waiting times no batch depends on how fast it is read.
        now = BEGINNING_OF_TIME if self._settings.until_end else self._clock.now()
        return self._cutter.next_batch(self.state, now, recorded_size, self._undecided)

    def step(self, items: Sequence[WaitingExperience], stop: threading.Event) -> Mapping[str, float]:
        """Train on a batch of `next_batch`.

        Returns:
            The step's measurements by name. They are empty if the gradient was not finite, so that the batch was
                dropped as `invalid`, and if the algorithm refused the step, so that training stops or the batch waits.

        Raises:
            Abandoned: the process is ending. The state in memory must not be saved.
            LearnerLost: the learner has failed. The state in memory must not be saved.
            StepFailed: the step failed, or was lost three times, and nothing was changed. Call `step_isolated` next.
        """
        items = self._without_culprits(items)
        check_losses(self._journal, items)
        with self._journal.watch_step(items):
            return self._step(items, stop)

    def _step(self, items: Sequence[WaitingExperience], stop: threading.Event) -> Mapping[str, float]:
        settings = self._settings
        items, prepared = self._prepare(items)
        if prepared is None:
            return {}
        digest, measures_base = prepared.batch.digest(), self._measures_base
        try:
            result = try_step(
                lambda batch: self.learner.step(batch, stop, from_base=measures_base), items, prepared.batch
            )
        except StepRefused as refused:
            self._handle_refusal(refused, len(items))
            return {}
        self._undecided, self._trained_batch = 0, prepared.batch
        measured = {**summary.summarize_batch(prepared, self.state), **result.measured}
        trained = apply_result(prepared, result, has_teacher=settings.needs.teacher)
        self.state.record_step(trained, prepared.baselines, measured[GRADIENT_FACTOR])
        self.state.record_batch(digest, len(items))
        self._tensors_moved = True
        self._differs_from_head = self._differs_from_head or result.moved
        self._measured.append(measured)
        self.health = self.health.with_step(measured, settings.health)
        return measured

    def step_isolated(self, failure: StepFailed, stop: threading.Event) -> Mapping[str, float]:
        """Drop the experiences that made a step fail, and train the others.

        Must not be called while a save is being written, because only one copy of the weights may exist. If no single
        experience makes the gradient infinite, the whole batch is dropped.

        Returns:
            The measurements, as `step` does.

        Raises:
            Exception: the cause of `failure`; the learner fails on every batch. Otherwise as `step` does.
        """
        while items := self._isolate(failure, stop):
            try:
                return self.step(items, stop)
            except StepFailed as again:
                failure = again
        return {}

    def _isolate(self, failure: StepFailed, stop: threading.Event) -> Sequence[WaitingExperience]:
        """Drop the experiences that made a step fail, and return the others."""
        with open_trials(self.learner, self._store, self._prepare_batch, stop, self._journal) as trials:
            culprits = trials.isolate(failure, self._trained_batch)
        if not culprits and isinstance(failure.cause, NotFinite):
            self._drop_not_finite(failure.items)
            return ()
        reasons = {item.experience.experience_id: failure_reason(error) for item, error in culprits}
        self._journal.end_search(failure.suspects, reasons)
        return leave_out(self.state, failure.items, reasons)

    def _drop_not_finite(self, items: Sequence[WaitingExperience]) -> None:
        digest = self._prepare_batch(items).batch.digest()
        log.error("gradient_not_finite", batch=digest, experiences=len(items))
        NOT_FINITE.inc()
        for item in items:
            self.state.drop(item, "invalid")
        self.state.record_batch(digest, len(items))
        self.health = self.health.with_step({"gradient_norm": math.inf}, self._settings.health)

    def _without_culprits(self, items: Sequence[WaitingExperience]) -> Sequence[WaitingExperience]:
        """Drop the experiences that the original training of a replay left out, and those that an earlier process found
        to be at fault. Return the others.
        """
        reason = "the training step of the original lineage failed with this experience"
        reasons = dict.fromkeys(self.recorded_left_out, reason) | self._journal.reasons(items)
        return leave_out(self.state, items, reasons)

    def _prepare(self, items: Sequence[WaitingExperience]) -> tuple[Sequence[WaitingExperience], PreparedBatch | None]:
        """Build a training batch from waiting experiences, and return it with the experiences in it. Experiences that
        cannot be prepared are dropped as `invalid`.
        """
        if not items:
            return (), None
        isolated = prepare_isolated(items, self._prepare_batch)
        reasons = {item.experience.experience_id: reason for item, reason in isolated.culprits}
        leave_out(self.state, items, reasons)
        return isolated.items, isolated.prepared

    def _prepare_batch(self, items: Sequence[WaitingExperience]) -> PreparedBatch:
        settings = self._settings
        # A batch that waited until it was large enough for a decision counts as one step, whatever its size.
        full_batch_rows = max(settings.batch_experiences, len(items) if settings.needs.hindsight else 0)
        return prepare(items, self.state, settings.advantage, self._decay, full_batch_rows, settings.loss)

    def _handle_refusal(self, refused: StepRefused, experiences: int) -> None:
        """Handle a refused step: let the batch wait if it has grown since the last refusal, otherwise stop training."""
        if refused.undecided and experiences > self._undecided:
            log.info(
                "step_waits",
                measure=refused.measure,
                value=refused.value,
                experiences=experiences,
                wanted=2 * experiences,
            )
            self._undecided = experiences
            return
        log.error("step_refused", measure=refused.measure, value=refused.value, why=refused.why)
        self._undecided = 0
        self.health = self.health.with_refusal(refused.measure, refused.value, refused.why)

    @property
    def _measures_base(self) -> bool:
        """Whether the next step must measure the divergence of the weights from the base."""
        interval = self._settings.health.kl_base_interval_steps
        return interval > 0 and self.state.steps % interval == 0

    def revert_to_last_version(self) -> dict[str, tuple[int, ...]]:
        """Reset the weights to the last version, and return the lost revisions as `control` does."""
        return self._go_back(self.state.history.head)

    def resume(self) -> None:
        """Let training continue after a step beyond a limit of `[trainer.health]` has stopped it."""
        self.health = self.health.after_resume()

    def control(self, event: ModelEvent) -> dict[str, tuple[int, ...]]:
        """Apply a decision of the registry: reset the weights to another version if `plan_control` requires it.

        Returns:
            The revisions, by experience id, whose training the reset removed from the weights. Pass them to
                `LineageState.undo`.
        """
        state = self.state
        course = control.plan_control(event, state.history, state.promoted)
        state.promoted = course.promoted
        if course.rewind_to is None:
            return {}
        log.info("weights_go_back", version=course.rewind_to, decision=event.decision, about=event.version)
        return self._go_back(course.rewind_to)

    def _go_back(self, version: str) -> dict[str, tuple[int, ...]]:
        REWINDS.inc()
        point = self.saved.restore_points.get(version)
        if point is not None:
            with self._store.open_tensors(point) as folder:
                self.learner.restore(folder, with_random=False)
        else:
            log.warning(
                "optimizer_starts_afresh",
                version=version,
                remedy="raise memory.restore_points and memory.restore_points_bytes",
            )
            versions.load_weights(self._blobs, self._manifest(version), self.learner)
        self._tensors_moved, self._differs_from_head = True, False
        self.health = self.health.after_rewind()
        return self.state.go_back(version)

    def save(self, *, publish: bool) -> bool:
        """Make weights, optimizer and state durable.

        The caller must send `saved.metrics` afterwards, and `saved.checkpoint` if there is a new version.

        Args:
            publish: whether to publish the weights as a new version, if they differ from their parent's.

        Returns:
            Whether there is a new version.

        Raises:
            Exception: an error of `Save.write`; the durable state is then unchanged.
        """
        save = self.begin_save(publish=publish)
        try:
            save.write()
        except BaseException:
            self._revert_save(save)
            raise
        return self.end_save(save)

    def begin_save(self, *, publish: bool) -> Save:
        """Begin a save of the present state. Steps may continue before it is written.

        Call `Save.write` next, in any thread, and `end_save` before any other operation than a step.
        """
        state, moved = self.state, self._tensors_moved
        copy = self.learner.copy(self._first.version if publish else None) if moved or publish else None
        now = self._clock.now()
        state.evict_old_entries(now)
        reported = state.take_report()
        snapshot = LineageSnapshot(
            time=now,
            steps=state.steps,
            history=state.history,
            state_fields=state.snapshot(),
            reported=reported,
            measured=tuple(self._measured),
            health=self.health,
            promoted=state.promoted,
        )
        save = Save(LineageResources(self._settings, self._blobs, self._store, self._first), self.saved, snapshot, copy)
        self._measured.clear()
        self._tensors_moved, self._steps_saved = False, state.steps
        self._differs_from_head = self._differs_from_head and not publish
        state.history = save.provisional_history()
        return save

    def end_save(self, save: Save) -> bool:
        """Apply the result of a durable save to this lineage. Return whether there is a new version."""
        assert save.result is not None, "it is written first"
        self.saved, self.state.history, new = save.result
        self._journal.note_save(self.saved.steps)
        return new

    def _revert_save(self, save: Save) -> None:
        self.state.put_back(save.snapshot.reported)
        self.state.history, self._steps_saved = save.snapshot.history, self.saved.steps
        self._measured[:0] = save.snapshot.measured
        self._tensors_moved = save.copy is not None
        self._differs_from_head = self._differs_from_head or save.publishes
        if save.copy is not None:
            save.copy.drop()

    def check(self) -> None:
        """Raise `LearnerLost` if the learner has failed. Call it between steps to notice a failure early."""
        if (why := self.learner.failure) is not None:
            name = self._settings.lineage
            raise LearnerLost(f"lineage {name} has lost its weights: {why}; a restart continues from the last save")

    def close(self) -> None:
        """Close the learner. No method may be called afterwards, except `close` again."""
        self.learner.close()

    def _manifest(self, version: str) -> Manifest:
        return files.read_manifest(self._blobs, self.state.history[version].manifest)
