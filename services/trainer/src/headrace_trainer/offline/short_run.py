"""A short training without a bus: all experiences of a recording, from the base, into a lineage that nobody serves.

As a filter (`python -m headrace_trainer.short_training`) it takes lines `experience` and writes one line `trained`.
Admission, cutting, advantages, step and optimizer are those of training. One thing is not: versions of another lineage
count as the newest, however old they are. Two such trainings shall differ by rewards alone, so nothing may be dropped
in one for having been sampled long ago and trained in the other; what separates them from the weights is corrected by
importance, as ever. What comes of it is compared and thrown away: no version of it is announced (P5 is about what
serves).
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import SystemClock
from headrace_runtime.filters import Lines
from headrace_runtime.settings import Common
from headrace_schemas import Experience
from headrace_schemas.controls import ShortRun
from headrace_trainer.experiences.admission import versions_of
from headrace_trainer.lineage.culprits import StepFailed
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings

_NEWEST = 2**62


async def run(common: Common, settings: TrainerSettings) -> None:
    """The filter."""
    lines = Lines()
    training = ShortTraining(settings, BlobStore.open(common))
    async for _, value in lines.read():
        training.add(Experience.from_json(value))
    lines.write("trained", training.end().model_dump_json().encode())
    lines.flush()


class ShortTraining:
    """`add` experiences in order, then `end`. Blocks: the process does nothing else."""

    def __init__(self, settings: TrainerSettings, blobs: BlobStore) -> None:
        """Raises as a start of the trainer does."""
        self._clock = SystemClock()
        # Nobody waits: batches are cut by count alone, so that they are the same whenever they are made.
        self._settings = settings.model_copy(update={"until_end": True, "cut": "rules"})
        self._lineage = open_lineage(self._settings, blobs, self._clock)
        assert self._lineage.saved.checkpoint is not None
        self._base = self._lineage.saved.checkpoint
        self._stop = threading.Event()
        self._place = 0

    def add(self, experience: Experience) -> None:
        """Experiences of other models are passed over."""
        if experience.model != self._settings.model:
            return
        state = self._lineage.state
        foreign = [version for version in versions_of(experience) if version not in state.history]
        if any(version not in state.history.replayed for version in foreign):
            known = {**state.history.replayed, **dict.fromkeys(foreign, _NEWEST)}
            state.history = replace(state.history, replayed=known)
        state.admit(experience, (0, self._place), self._clock.now())
        self._place += 1
        self._act()

    def end(self) -> ShortRun:
        """Nothing more will come."""
        while self._act(over=True):
            pass
        lineage = self._lineage
        stopped = lineage.health.stopped
        fates = Counter(outcome.dropped for outcome in lineage.state.outcomes)
        lineage.save(publish=lineage.state.steps > 0)
        lineage.close()
        assert lineage.saved.checkpoint is not None
        return ShortRun(
            base=self._base,
            last=lineage.saved.checkpoint,
            trained=fates.pop(None, 0),
            dropped={reason: count for reason, count in fates.items() if reason is not None},
            steps=lineage.state.steps,
            stopped=stopped.reason if stopped else None,
        )

    def _act(self, *, over: bool = False) -> bool:
        if self._lineage.finished():
            return False
        items = self._lineage.next_batch(over=over)
        if items:
            try:
                self._lineage.step(items, self._stop)
            except StepFailed as failure:
                self._lineage.step_isolated(failure, self._stop)
        return bool(items)
