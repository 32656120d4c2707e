"""Learner whose weights are the list of the examples (lessons) that trained them.

It is a back end like any other (`headrace_trainer.learner.Learner`, `tests/contract/learner`); everything around it
(admission, batches, state, saves, versions, rollbacks) is the trainer's own code. The weights of any version therefore
show an experience that was trained twice, and a row whose tokens changed on the way.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import ModelEvent
from headrace_schemas.values.base import Model
from headrace_schemas.values.blobs import Fingerprint, Manifest
from headrace_trainer.backends import Backend
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.learner import (
    GRADIENT_FACTOR,
    Abandoned,
    Abilities,
    Frozen,
    Learner,
    NotFinite,
    StepResult,
    WholeLearner,
)
from headrace_trainer.settings import TrainerSettings

VOCABULARY = 4096
CONTEXT = 4096
WEIGHTS = "model.safetensors"
BASE = Path(__file__).parent / "base"
"""Folder of a base model, whose weights hold no lessons."""


class Lesson(Model):
    """Entry of the weights: one row that one step trained."""

    step: int
    experience_id: str
    revision: int
    advantage: float
    tokens_sha256: str

    @classmethod
    def of(cls, row: Row, step: int) -> Lesson:
        return cls(
            step=step,
            experience_id=row.experience_id,
            revision=row.revision,
            advantage=float(row.advantage),
            tokens_sha256=tokens_digest(row.token_ids_T.tolist(), row.loss_mask_T.tolist(), row.behaviour_T.tolist()),
        )


def tokens_digest(token_ids: list[int], mask: list[bool], behaviour: list[float]) -> str:
    """Return the digest of one trained sequence: token ids, loss mask, and the engine's logprobs."""
    return hashlib.sha256(repr((token_ids, list(map(bool, mask)), behaviour)).encode()).hexdigest()


def read(data: bytes) -> tuple[Lesson, ...]:
    """Return the lessons in a version's weights."""
    return tuple(Lesson.model_validate(lesson) for lesson in json.loads(data))


def read_frozen(weights: bytes) -> tuple[Lesson, ...]:
    """Return the lessons in a lineage's saved weights."""
    return read(weights.partition(b"\n")[2])


def pending_lessons(optimizer: bytes) -> tuple[Lesson, ...]:
    """Return the lessons in a lineage's saved optimizer: those of steps that changed no weight."""
    return tuple(Lesson.model_validate(lesson) for lesson in json.loads(optimizer.partition(b"\n")[2])["pending"])


def lessons_of(blobs: BlobStore, manifest: Manifest) -> tuple[Lesson, ...]:
    """Return all lessons of a published version."""
    (weights,) = (file for file in manifest.files if file.path == WEIGHTS)
    return read(blobs.get(weights.blob))


class RememberingLearner(WholeLearner):
    """Learner that appends each trained row to its weights."""

    def __init__(self, lineage: str) -> None:
        self._lineage = lineage
        self.lessons: tuple[Lesson, ...] = ()
        self.pending: tuple[Lesson, ...] = ()
        """Lessons of the last batches whose advantages were all 0. As in every back end, such a batch changes no
        weight, and the next batch that changes weights includes its lessons.
        """
        self.updates = 0

    @property
    def abilities(self) -> Abilities:
        return Abilities(kind="full", vocabulary=VOCABULARY, context=CONTEXT)

    @property
    def failure(self) -> str | None:
        return None

    def sequence_bound(self) -> int:
        return CONTEXT

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if stop.is_set():
            raise Abandoned
        if not all(math.isfinite(row.advantage) for row in batch.rows):
            raise NotFinite
        self.updates += 1
        self.pending += tuple(Lesson.of(row, self.updates) for row in batch.rows)
        moved = any(row.has_advantage for row in batch.rows)
        if moved:
            self.lessons, self.pending = self.lessons + self.pending, ()
        measured = {"loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.0, GRADIENT_FACTOR: batch.token_weight}
        return StepResult(measured | {"step_seconds": 0.0, "tokens_per_second": 0.0}, moved=moved)

    def freeze(self) -> Frozen:
        about = f"training state of lineage {self._lineage}\n".encode()
        optimizer = {"updates": self.updates, "pending": [lesson.model_dump() for lesson in self.pending]}
        return Frozen(about + self._bytes(), about + json.dumps(optimizer).encode())

    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        self.lessons = read_frozen(bytes(frozen.weights))
        self.pending = pending_lessons(bytes(frozen.optimizer))
        self.updates = json.loads(bytes(frozen.optimizer).partition(b"\n")[2])["updates"]

    def load(self, folder: Path) -> None:
        self.lessons, self.pending, self.updates = read((folder / WEIGHTS).read_bytes()), (), 0

    def write(self, folder: Path, base: str) -> Fingerprint:
        (folder / WEIGHTS).write_bytes(self._bytes())
        return self._fingerprint(self._bytes())

    def fingerprint_of_base(self) -> Fingerprint:
        return self._fingerprint(b"[]")

    def close(self) -> None:
        """Do nothing, because the learner holds no resources."""

    def _bytes(self) -> bytes:
        return json.dumps([lesson.model_dump() for lesson in self.lessons]).encode()

    @staticmethod
    def _fingerprint(weights: bytes) -> Fingerprint:
        share = int.from_bytes(hashlib.sha256(weights).digest()[:4]) / 2**32
        return Fingerprint(token_ids=(1, 2), logprobs=(-1.0 - share,))


def _open(_folder: Path, settings: TrainerSettings) -> Learner:
    return RememberingLearner(settings.lineage)


BACKEND = Backend(_open)


class Silent:
    """Replacement of `headrace_trainer.report.Reporter` that writes no files."""

    def __init__(self, *_: object) -> None:
        """Ignore the arguments."""

    def report_step(self, measured: Mapping[str, float], state: LineageState) -> None: ...

    def report_version(self, version: str, number: int, step: int) -> None: ...

    def report_stop(self, reason: str | None, state: LineageState) -> None: ...

    def report_decision(self, event: ModelEvent, number: int, step: int) -> None: ...

    def close(self) -> None: ...


AS_TORCH: Mapping[str, Any] = {"headrace_trainer.torch_learner.TORCH": BACKEND}
"""Replacement of the default back end, by the name to patch."""
STANDS_FOR: Mapping[str, Any] = {**AS_TORCH, "headrace_trainer.app.Reporter": Silent}
