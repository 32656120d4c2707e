"""Learners that break one promise each."""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace
from pathlib import Path

from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import GRADIENT_FACTOR, Abilities, StepResult
from headrace_trainer.whole import Frozen, WholeCopy
from tests.contract.learner import promises
from tests.contract.learner.promises import Promise
from tests.simulation.learner import RememberingLearner


class ForgetsTheOptimizer(RememberingLearner):
    """Goes back with the weights alone."""

    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        super().thaw(frozen, with_random=with_random)
        self.updates = 0


class KeepsMomentum(RememberingLearner):
    """Goes on, on another version's weights, as on its own."""

    def load(self, folder: Path) -> None:
        updates = self.updates
        super().load(folder)
        self.updates = updates


class Nameless(RememberingLearner):
    """Lineages with equal weights share a blob, and one of them removes it."""

    def __init__(self, _lineage: str) -> None:
        super().__init__("any")


class LooksAfterwards(RememberingLearner):
    """Finds out too late that the gradient was not finite."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if len(batch.rows) == 3:
            self.updates += 1
        return super().step(batch, stop, from_base=from_base)


class AlwaysMoves(RememberingLearner):
    """Reports that a step moved the weights when it did not."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        return replace(super().step(batch, stop, from_base=from_base), moved=True)


class Deaf(RememberingLearner):
    """Ignore a stop request."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        return super().step(batch, threading.Event(), from_base=from_base)


class PassesOverCorrections(RememberingLearner):
    """Train new rows only."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        return super().step(Batch(batch.first or batch.rows, batch.full_rows), stop, from_base=from_base)


class Unmeasured(RememberingLearner):
    """Leave out the factor of a token's gradient."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        outcome = super().step(batch, stop, from_base=from_base)
        return StepResult({name: value for name, value in outcome.measured.items() if name != GRADIENT_FACTOR})


class Random(RememberingLearner):
    """Never the same twice."""

    def freeze(self) -> Frozen:
        frozen = super().freeze()
        return Frozen(frozen.weights, frozen.optimizer + secrets.token_bytes(4))


class AnswersAsTheBase(RememberingLearner):
    """Compute a fingerprint that is independent of the files."""

    def write(self, folder: Path, base: str) -> Fingerprint:
        super().write(folder, base)
        return self.fingerprint_of_base()


class WritesMore(RememberingLearner):
    """Write a configuration next to the weights, which would replace the base's."""

    def write(self, folder: Path, base: str) -> Fingerprint:
        (folder / "config.json").write_text("{}")
        return super().write(folder, base)


class Grows(RememberingLearner):
    """Depend on the time of the call."""

    @property
    def abilities(self) -> Abilities:
        abilities = super().abilities
        return Abilities(abilities.kind, abilities.vocabulary + self.updates, abilities.context)


class RandomWeights(RememberingLearner):
    """Learns something else each time."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        outcome = super().step(batch, stop, from_base=from_base)
        last = self.lessons[-1].model_copy(update={"tokens_sha256": secrets.token_hex(32)})
        self.lessons = (*self.lessons[:-1], last)
        return outcome


class Stays(RememberingLearner):
    """Goes back at a start alone."""

    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        if with_random:
            super().thaw(frozen, with_random=True)


class CopiesLate(RememberingLearner):
    """Read the state when the copy is written, not when it is taken."""

    def copy(self, base: str | None) -> WholeCopy:
        learner, copied = self, super().copy(base)

        class Late(WholeCopy):
            def write(self, folder: Path) -> None:
                WholeCopy(learner.freeze(), copied.fingerprint, copied.version).write(folder)

        return Late(copied.frozen, copied.fingerprint, copied.version)


class ClosesOnce(RememberingLearner):
    """Breaks when it is closed again, as a clean end after a failure does."""

    def close(self) -> None:
        del self.lessons


FAULTS: tuple[tuple[type[RememberingLearner], Promise], ...] = (
    (Grows, promises.it_says_what_it_can_be_given),
    (Unmeasured, promises.a_step_changes_the_weights_and_is_measured),
    (PassesOverCorrections, promises.corrections_are_trained),
    (RandomWeights, promises.equal_calls_make_equal_weights),
    (Random, promises.freezing_changes_nothing),
    (ForgetsTheOptimizer, promises.another_process_goes_on_as_if_nothing_had_happened),
    (Stays, promises.it_goes_back),
    (CopiesLate, promises.a_copy_is_of_its_moment),
    (Nameless, promises.lineages_share_no_blob),
    (LooksAfterwards, promises.what_is_not_finite_changes_nothing),
    (AlwaysMoves, promises.a_step_reports_whether_it_moved_the_weights),
    (Deaf, promises.a_step_that_is_told_to_stop_is_abandoned),
    (AnswersAsTheBase, promises.a_version_is_what_was_trained),
    (WritesMore, promises.a_version_holds_weights_alone),
    (KeepsMomentum, promises.loading_forgets_all_momentum),
    (AnswersAsTheBase, promises.the_base_answers_as_the_base),
    (ClosesOnce, promises.it_may_be_closed_twice),
)
"""Faults, and the promise that finds each."""
