"""A lineage: weights, optimizer and state, and everything that may happen to them. No bus in here, and no event loop.

`open_lineage` (in `opening`) finds the state that was saved last, or begins from the base. After that, experiences are
admitted one by one, a step is taken when `next_batch` has one, and `save` makes all of it durable at once. If the
process dies, the next one goes on from the last save. Weights and optimizer are with a `Learner`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

from headrace_runtime import versions as files
from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import Clock
from headrace_runtime.isolation import reason_of
from headrace_runtime.logs import get_logger
from headrace_runtime.metrics import ITEMS_FAILED
from headrace_schemas import ModelEvent
from headrace_schemas.manifest import Manifest
from headrace_trainer.batches import summary
from headrace_trainer.batches.batch import Batch
from headrace_trainer.batches.cutting import BEGINNING_OF_TIME, END_OF_TIME, Cutter, decay
from headrace_trainer.batches.prepare import Prepared, prepare, prepare_isolated
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import Waiting
from headrace_trainer.learner import GRADIENT_FACTOR, Learner, LearnerLost, NotFinite, StepRefused
from headrace_trainer.lineage import control, versions
from headrace_trainer.lineage.culprits import StepFailed, open_trials, try_step
from headrace_trainer.lineage.saved import Saved
from headrace_trainer.lineage.saving import LineagePlace, Moment, Save
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.lineage.taken import as_taken
from headrace_trainer.metrics import NOT_FINITE, REWINDS
from headrace_trainer.settings import TrainerSettings

log = get_logger(__name__)


class Lineage:
    """Not safe for concurrent use: whoever owns it makes one call at a time. `step`, `save` and `control` block."""

    def __init__(
        self,
        settings: TrainerSettings,
        clock: Clock,
        blobs: BlobStore,
        store: LineageStore,
        first: Manifest,
        learner: Learner,
        state: LineageState,
        saved: Saved,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._blobs = blobs
        self._store = store
        self._first = first
        self.learner = learner
        self.state = state
        self.saved = saved
        """What is durable."""
        self.health = saved.health
        self._measured: list[Mapping[str, float]] = []
        self._tensors_moved = False
        self._differs = saved.differs_from_head
        """Whether a step has changed the weights since the version that they descend from."""
        self._steps_saved = saved.steps
        self._decay = decay(settings)
        self._cutter = Cutter(settings)
        self.recorded_left_out: frozenset[str] = frozenset()
        """Experiences that the original of a replay left out of the batches that are cut now."""
        self._trained_batch: Batch | None = None
        """The last batch that was trained."""
        self._undecided = 0
        """Experiences of the last step that was refused because they were too few to decide on it. Not saved: the next
        process measures the same of them."""

    @property
    def version_due(self) -> bool:
        due = self.state.steps - self.state.history.head_step >= self._settings.steps_per_version
        return due and self.unpublished

    @property
    def unpublished(self) -> bool:
        """Whether steps have changed the weights that no version holds, and that one may be made of."""
        return self.state.current is None and self._differs and not self.health.doubtful

    @property
    def save_bytes(self) -> int:
        """About what the next save writes: weights and optimizer, and the weights once more as a version."""
        return 2 * self.saved.present.weights.size + self.saved.present.optimizer.size

    def save_due(self, since_s: float) -> bool:
        """`since_s`: seconds since the last save. A version that is due waits for the step that it is made of."""
        stepped, outcomes = self.state.steps != self._steps_saved, len(self.state.outcomes)
        if stepped and self.version_due:
            return True
        late = since_s >= self._settings.save_interval_s
        full = max(outcomes, len(self.state.read)) >= self._settings.memory.outcomes
        return full or (late and (stepped or outcomes > 0))

    def finished(self) -> bool:
        """Whether the lineage has taken all its steps. Each step may change it."""
        return self._settings.max_steps is not None and self.state.steps >= self._settings.max_steps

    def next_batch(self, mark: int | None = None, *, over: bool = False) -> tuple[Waiting, ...]:
        """What to train now, empty when it is not time or training is stopped; see `Cutter.next`. `over`: nothing more
        will come."""
        if self.health.stopped is not None:
            return ()
        if over:
            return self._cutter.next(self.state, END_OF_TIME, mark, self._undecided)
        # What is complete from the start is not waited for: then no batch depends on how fast it is read.
        now = BEGINNING_OF_TIME if self._settings.until_end else self._clock.now()
        return self._cutter.next(self.state, now, mark, self._undecided)

    def step(self, items: Sequence[Waiting], stop: threading.Event) -> Mapping[str, float]:
        """Train on what `next_batch` returned; the measurements, empty when the gradient was not finite and the batch
        was dropped as `invalid`, and when the step was refused: then the batch waits, and training stops, unless a
        larger one may decide otherwise.
        Raises `Abandoned` or `LearnerLost`, with nothing changed that a later save would see, and `StepFailed`, with
        nothing changed at all: `step_isolated` is then called."""
        settings = self._settings
        items, prepared = self._prepare(self._without_recorded(items))
        if prepared is None:
            return {}
        digest, asks_base = prepared.batch.digest(), self._asks_base
        try:
            taken = try_step(lambda batch: self.learner.step(batch, stop, from_base=asks_base), items, prepared.batch)
        except StepRefused as refused:
            self._refused(refused, len(items))
            return {}
        self._undecided, self._trained_batch = 0, prepared.batch
        found = {**summary.of_batch(prepared, self.state.history), **taken.measured}
        self.state.stepped(as_taken(prepared, taken), prepared.baselines, found[GRADIENT_FACTOR])
        self.state.cut(digest, len(items))
        self._tensors_moved = True
        self._differs = self._differs or taken.moved
        self._measured.append(found)
        self.health = self.health.after(found, settings.health)
        return found

    def step_isolated(self, failure: StepFailed, stop: threading.Event) -> Mapping[str, float]:
        """Leave out the experiences because of which a step failed, and train the others; return what `step` does.

        Must not be called while a save is being written: there is one copy of the weights at a time. A batch whose
        gradient is not finite whichever part of it is left out is dropped as a whole.

        Raises:
            Exception: The cause of `failure`; the learner fails whatever it is given. Otherwise as `step` does.
        """
        while items := self._isolate(failure, stop):
            try:
                return self.step(items, stop)
            except StepFailed as again:
                failure = again
        return {}

    def _isolate(self, failure: StepFailed, stop: threading.Event) -> Sequence[Waiting]:
        """Leave out the experiences because of which a step failed, and return the others."""
        not_finite = isinstance(failure.cause, NotFinite)
        with open_trials(self.learner, self._store, self._ready, stop) as trials:
            if not not_finite and trials.passes(failure.items):
                return failure.items
            culprits = trials.find_culprits(failure)
            if not culprits and not not_finite:
                culprits = [(item, failure.cause) for item in failure.items]
            if len(culprits) == len(failure.items) and not trials.is_learner_sound(self._trained_batch):
                culprits = []
        if not culprits and not not_finite:
            raise failure.cause
        if not culprits:
            self._drop_not_finite(failure.items)
            return ()
        for item, error in culprits:
            reason = "the gradient is not finite" if isinstance(error, NotFinite) else reason_of(error)
            self._leave_out(item, reason)
        names = {item.experience.experience_id for item, _ in culprits}
        return [item for item in failure.items if item.experience.experience_id not in names]

    def _drop_not_finite(self, items: Sequence[Waiting]) -> None:
        digest = self._ready(items).batch.digest()
        log.error("gradient_not_finite", batch=digest, experiences=len(items))
        NOT_FINITE.inc()
        for item in items:
            self.state.drop(item, "invalid")
        self.state.cut(digest, len(items))
        self.health = self.health.after({"gradient_norm": math.inf}, self._settings.health)

    def _leave_out(self, item: Waiting, reason: str) -> None:
        name, kind = item.experience.experience_id, reason.partition(":")[0]
        log.error("item_failed", step="training", item=name, kind=kind)
        ITEMS_FAILED.labels("training").inc()
        self.state.leave_out(item, reason)

    def _without_recorded(self, items: Sequence[Waiting]) -> Sequence[Waiting]:
        """Leave out what the original of a replay left out, whatever it would do here (P9)."""
        left_out = [item for item in items if item.experience.experience_id in self.recorded_left_out]
        for item in left_out:
            self.state.leave_out(item, "the step of the original lineage failed with it")
        return [item for item in items if item.experience.experience_id not in self.recorded_left_out]

    def _prepare(self, items: Sequence[Waiting]) -> tuple[Sequence[Waiting], Prepared | None]:
        """Prepare a batch. An experience that breaks it is dropped as `invalid`, and the others go on without it."""
        if not items:
            return (), None
        isolated = prepare_isolated(items, self._ready)
        for item, reason in isolated.culprits:
            self._leave_out(item, reason)
        return isolated.items, isolated.prepared

    def _ready(self, items: Sequence[Waiting]) -> Prepared:
        settings = self._settings
        # What waited until it was decided is one step and no longer one, however much came together.
        whole = max(settings.batch_experiences, len(items) if settings.needs.hindsight else 0)
        return prepare(items, self.state, settings.advantage, self._decay, whole, settings.loss)

    def _refused(self, refused: StepRefused, experiences: int) -> None:
        """It waits for more experiences where these decide it, unless none came since it waited last."""
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
        self.health = self.health.refusing(refused.measure, refused.value, refused.why)

    @property
    def _asks_base(self) -> bool:
        """Whether the next step measures how far the weights are from the base."""
        interval = self._settings.health.kl_base_interval_steps
        return interval > 0 and self.state.steps % interval == 0

    def give_up(self) -> dict[str, tuple[int, ...]]:
        """Training has stopped: go back to the last version, which has none of the steps that stopped it. Returns what
        `control` does."""
        return self._go_back(self.state.history.head)

    def resume(self) -> None:
        """Somebody wants training to go on."""
        self.health = self.health.resumed()

    def control(self, event: ModelEvent) -> dict[str, tuple[int, ...]]:
        """Follow a decision of the registry; see `headrace_trainer.lineage.control`. Returns what that undid, see
        `LineageState.go_back`; `LineageState.undo` is to be told."""
        state = self.state
        course = control.follow(event, state.history, state.promoted)
        state.promoted = course.promoted
        if course.rewind is None:
            return {}
        log.info("weights_go_back", version=course.rewind, decision=event.decision, about=event.version)
        return self._go_back(course.rewind)

    def _go_back(self, version: str) -> dict[str, tuple[int, ...]]:
        REWINDS.inc()
        point = self.saved.restore_points.get(version)
        if point is not None:
            with self._store.unpacked(point) as folder:
                self.learner.restore(folder, with_random=False)
        else:
            log.warning("optimizer_starts_afresh", version=version, remedy="raise memory.restore_points")
            versions.load(self._blobs, self._manifest(version), self.learner)
        self._tensors_moved, self._differs = True, False
        self.health = self.health.rewound()
        return self.state.go_back(version)

    def save(self, *, publish: bool) -> bool:
        """Make everything durable, as a new version when `publish` and when the weights differ from their parent's.

        Returns whether there is a new version. The bus is then to be told `saved.checkpoint`, if there is, and
        `saved.metrics`. Raises what `Save.write` does, with nothing changed.
        """
        save = self.begin_save(publish=publish)
        try:
            save.write()
        except BaseException:
            self._give_up_save(save)
            raise
        return self.end_save(save)

    def begin_save(self, *, publish: bool) -> Save:
        """The same in three: what is to be saved is what there is by now, and steps may follow. `Save.write` is called
        then, beside them or not, and `end_save` before anything but a step."""
        state, moved = self.state, self._tensors_moved
        copy = self.learner.copy(self._first.version if publish else None) if moved or publish else None
        now = self._clock.now()
        state.forget(now)
        reported = state.hand_over()
        moment = Moment(
            time=now,
            steps=state.steps,
            history=state.history,
            snapshot=state.snapshot(),
            reported=reported,
            measured=tuple(self._measured),
            health=self.health,
            promoted=state.promoted,
        )
        save = Save(LineagePlace(self._settings, self._blobs, self._store, self._first), self.saved, moment, copy)
        self._measured.clear()
        self._tensors_moved, self._steps_saved = False, state.steps
        self._differs = self._differs and not publish
        state.history = save.history_meanwhile()
        return save

    def end_save(self, save: Save) -> bool:
        """Once `save` is durable; as `save` returns."""
        assert save.made is not None, "it is written first"
        self.saved, self.state.history, new = save.made
        return new

    def _give_up_save(self, save: Save) -> None:
        self.state.take_back(save.moment.reported)
        self.state.history, self._steps_saved = save.moment.history, self.saved.steps
        self._measured[:0] = save.moment.measured
        self._tensors_moved = save.copy is not None
        self._differs = self._differs or save.publishes
        if save.copy is not None:
            save.copy.drop()

    def check(self) -> None:
        """Raises `LearnerLost` when what holds the weights has failed: nobody waits for a step to find it out."""
        if (why := self.learner.failure) is not None:
            name = self._settings.lineage
            raise LearnerLost(f"lineage {name} has lost its weights: {why}; a new start goes on from the last save")

    def close(self) -> None:
        """Give back what the learner holds. Nothing may be asked afterwards, and closing again does nothing."""
        self.learner.close()

    def _manifest(self, version: str) -> Manifest:
        return files.read_manifest(self._blobs, self.state.history[version].manifest)
