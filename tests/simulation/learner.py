"""A model that remembers instead of learning: its weights are the list of all that it was trained on.

It takes the place of tensors, optimizer arithmetic and model files; everything around them (admission, batches, state,
saves, versions, rewinding) is the trainer's own. An experience that was trained twice, or a row whose tokens changed on
the way, is then something that can be read off the weights of any version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace_runtime.blobs import BlobStore
from headrace_schemas import ModelEvent
from headrace_schemas.base import Model
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import File, Fingerprint, Manifest
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.torch_learner.native import Compared
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.torch_learner.step import SHARE, Taken

VOCABULARY = 4096
CONTEXT = 4096
WEIGHTS = "model.safetensors"
_DIGEST = "0" * 64


class Lesson(Model):
    """What one row of one step left in the weights."""

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
    """Of one sequence as it is trained: ids, which of them count, and what the engine said about those."""
    return hashlib.sha256(repr((token_ids, list(map(bool, mask)), behaviour)).encode()).hexdigest()


def read(data: bytes) -> tuple[Lesson, ...]:
    """The lessons in a version's weights."""
    return tuple(Lesson.model_validate(one) for one in json.loads(data))


def _bytes(lessons: tuple[Lesson, ...]) -> bytes:
    return json.dumps([one.model_dump() for one in lessons]).encode()


class Policy:
    """`headrace_trainer.torch_learner.model.policy.Policy`."""

    lora = False
    vocabulary = VOCABULARY
    context = CONTEXT
    size = 1_000_000
    parameters: Mapping[str, object] = {}
    hidden: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.lessons: tuple[Lesson, ...] = ()

    @classmethod
    def open(cls, *_: object) -> Policy:
        return cls()

    def room(self) -> int:
        return CONTEXT


class Native:
    """`headrace_trainer.torch_learner.native.Native`: what has no attention is compared with nothing."""

    def __init__(self, *_: object) -> None:
        """Asks nobody."""

    def compare(self, _policy: Policy) -> Compared:
        return Compared("remembering", None, "", 0, ())


class Optimizer:
    """`headrace_trainer.torch_learner.optimizer.Optimizer`; it counts."""

    def __init__(self, *_: object) -> None:
        self.updates = 0

    def reset(self) -> None:
        self.updates = 0


def train(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    _settings: object,
    _tokens: int,
    _stop: threading.Event,
    *,
    from_base: bool = False,
) -> Taken:
    """`headrace_trainer.torch_learner.step.train`."""
    optimizer.updates += 1
    policy.lessons += tuple(Lesson.of(row, optimizer.updates) for row in batch.rows)
    return Taken({"loss": 0.0, SHARE: batch.token_weight, "step_seconds": 0.0, "tokens_per_second": 0.0})


class Tensors:
    """The functions of `headrace_trainer.torch_learner.tensors`."""

    @staticmethod
    def freeze(policy: Policy, optimizer: Optimizer, lineage: str) -> tuple[bytes, bytes]:
        """With the lineage's name inside, as the real ones: a version's files must not be taken for a state's."""
        about = f"training state of lineage {lineage}".encode()
        return about + b"\n" + _bytes(policy.lessons), about + b"\n" + str(optimizer.updates).encode()

    @staticmethod
    def thaw(policy: Policy, optimizer: Optimizer, weights: bytes, state: bytes, *, with_random: bool) -> None:
        policy.lessons = read(weights.partition(b"\n")[2])
        optimizer.updates = int(state.partition(b"\n")[2])


class Versions:
    """The functions of `headrace_trainer.lineage.versions`."""

    @staticmethod
    def check_base(_folder: Path) -> None:
        """There is none."""

    @staticmethod
    def check_same(_folder: Path, _first: Manifest, _lineage: str) -> None:
        """There is none."""

    @staticmethod
    def base_files(_blobs: BlobStore, _folder: Path) -> tuple[File, ...]:
        return ()

    @staticmethod
    @contextlib.contextmanager
    def unpacked(_blobs: BlobStore, _files: object) -> Iterator[Path]:
        yield Path("nowhere")

    @staticmethod
    def publish_base(
        blobs: BlobStore, _files: object, policy: Policy, *, name: str, lineage: str
    ) -> tuple[Manifest, BlobRef]:
        return _stored(blobs, policy, name, lineage, 0, None)

    @staticmethod
    def publish(
        blobs: BlobStore, policy: Policy, *, first: Manifest, lineage: str, step: int, parent: str
    ) -> tuple[Manifest, BlobRef]:
        return _stored(blobs, policy, first.name, lineage, step, parent)

    @staticmethod
    def load(blobs: BlobStore, manifest: Manifest, policy: Policy) -> None:
        policy.lessons = lessons_of(blobs, manifest)

    @staticmethod
    def weight_digests(manifest: Manifest) -> frozenset[str]:
        return frozenset(file.blob.sha256 for file in manifest.files)


def lessons_of(blobs: BlobStore, manifest: Manifest) -> tuple[Lesson, ...]:
    """What a published version was trained on, from its beginning."""
    return read(blobs.get(manifest.files[0].blob))


def _stored(
    blobs: BlobStore, policy: Policy, name: str, lineage: str, step: int, parent: str | None
) -> tuple[Manifest, BlobRef]:
    manifest = Manifest(
        name=name,
        lineage=lineage,
        step=step,
        parent=parent,
        files=(File(path=WEIGHTS, blob=blobs.put(_bytes(policy.lessons))),),
        fingerprint=Fingerprint(token_ids=(1, 2), logprobs=(-1.0,)),
        tokenizer_sha256=_DIGEST,
        template_sha256=_DIGEST,
    )
    return manifest, blobs.put(manifest.canonical_json())


class Silent:
    """`headrace_trainer.report.Reporter`."""

    def __init__(self, *_: object) -> None:
        """Writes nothing."""

    def step(self, measured: Mapping[str, float], state: LineageState) -> None: ...

    def published(self, version: str, number: int, step: int) -> None: ...

    def decided(self, event: ModelEvent, number: int, step: int) -> None: ...

    def close(self) -> None: ...


STANDS_FOR: Mapping[str, Any] = {
    "headrace_trainer.lineage.opening.Policy": Policy,
    "headrace_trainer.lineage.opening.Native": Native,
    "headrace_trainer.lineage.opening.Optimizer": Optimizer,
    "headrace_trainer.lineage.opening.tensors": Tensors,
    "headrace_trainer.lineage.opening.versions": Versions,
    "headrace_trainer.lineage.lineage.tensors": Tensors,
    "headrace_trainer.lineage.lineage.versions": Versions,
    "headrace_trainer.lineage.lineage.train": train,
    "headrace_trainer.app.Reporter": Silent,
}
