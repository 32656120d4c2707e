"""`python -m headrace_trainer.short_training`: trains all experiences of a recording from the base, without a bus, into
a scratch lineage that is never served.

As a filter it reads lines `experience` and writes one line `trained`.
Admission, cutting, advantages, step and optimizer are those of training, with one exception: versions of another
lineage count as the newest, however old they are. Two such trainings must differ by rewards alone, so an experience
must not be dropped as stale in one and trained in the other; importance weights correct the difference between the
sampling version and the weights. The resulting version is compared and discarded, and never announced: the
bound on staleness protects versions that serve.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

from headrace_runtime.clock import SystemClock
from headrace_runtime.main import Service
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience
from headrace_schemas.programs import ShortRun
from headrace_trainer.experiences.admission import versions_of
from headrace_trainer.lineage.culprits import StepFailed
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings

SERVICE = Service(
    "trainer", "Trains a scratch lineage without a bus.", TrainerSettings, "headrace_trainer.short_training:run"
)
_NEWEST = 2**62


async def run(common: Common, settings: TrainerSettings) -> None:
    """Run the filter on standard input and output."""
    lines = Lines()
    training = ShortTraining(settings, BlobStore.open(common))
    async for _, value in lines.read():
        training.add(Experience.from_json(value))
    lines.write("trained", training.end().model_dump_json().encode())
    lines.flush()


class ShortTraining:
    """Training on a recording, starting from the base. Call `add` for each experience in order, then `end`. Blocks."""

    def __init__(self, settings: TrainerSettings, blobs: BlobStore) -> None:
        """Open the training. Raises the errors that a start of the trainer raises."""
        self._clock = SystemClock()
        # Batches are cut by count alone, never by time, so that they do not depend on the speed of the process.
        self._settings = settings.model_copy(update={"until_end": True, "cut": "rules"})
        self._lineage = open_lineage(self._settings, blobs, self._clock)
        assert self._lineage.saved.checkpoint is not None
        self._base = self._lineage.saved.checkpoint
        self._stop = threading.Event()
        self._offset = 0

    def add(self, experience: Experience) -> None:
        """Admit an experience. Experiences of other models are skipped."""
        if experience.model != self._settings.model:
            return
        state = self._lineage.state
        versions = versions_of(experience, state.limits.rules)
        foreign = [version for version in versions if version not in state.history]
        if any(version not in state.history.replayed for version in foreign):
            replayed = {**state.history.replayed, **dict.fromkeys(foreign, _NEWEST)}
            state.history = replace(state.history, replayed=replayed)
        state.admit(experience, (0, self._offset), self._clock.now())
        self._offset += 1
        self._act()

    def end(self) -> ShortRun:
        """Train the remaining experiences and return the result."""
        while self._act(at_end=True):
            pass
        lineage = self._lineage
        stopped = lineage.health.stopped
        outcomes = Counter(outcome.dropped for outcome in lineage.state.outcomes)
        lineage.save(publish=lineage.state.steps > 0)
        lineage.close()
        assert lineage.saved.checkpoint is not None
        return ShortRun(
            base=self._base,
            last=lineage.saved.checkpoint,
            trained=outcomes.pop(None, 0),
            dropped={reason: count for reason, count in outcomes.items() if reason is not None},
            steps=lineage.state.steps,
            stopped=stopped.reason if stopped else None,
        )

    def _act(self, *, at_end: bool = False) -> bool:
        if self._lineage.is_finished():
            return False
        items = self._lineage.next_batch(at_end=at_end)
        if items:
            try:
                self._lineage.step(items, self._stop)
            except StepFailed as failure:
                self._lineage.step_isolated(failure, self._stop)
        return bool(items)


if __name__ == "__main__":
    SERVICE.main()
