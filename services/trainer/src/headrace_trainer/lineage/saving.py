"""One save of a lineage, from the snapshot of its state until it is durable, and the wait for free space on the disk
before it.

`Lineage.begin_save` takes the snapshot, and steps may go on; `Save.write` makes it durable, in any thread;
`Lineage.end_save` applies it. There is one save at a time. A crash before the end of `write` leaves the previous save:
the pointer is replaced last, by the lineage's owner alone (`headrace_trainer.lineage.store`).

A version gets its name from its files when the save is written. Until then steps use a provisional name for it. The
version counts for their staleness as if it were durable, so the duration of a save does not change the training.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from headrace_runtime.clock import Clock
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import versions as files
from headrace_runtime.storage.blobs import BlobStore, digest_of
from headrace_schemas import Checkpoint, TrainingMetrics
from headrace_schemas.values.blobs import BlobRef, File, Manifest
from headrace_trainer.batches import summary
from headrace_trainer.experiences.history import VERSIONS_MAX, History, PublishedVersion
from headrace_trainer.experiences.reports import SaveReport
from headrace_trainer.learner import VERSION, WEIGHTS, Copy
from headrace_trainer.lineage import versions
from headrace_trainer.lineage.health import Health
from headrace_trainer.lineage.saved import Assembly, SavedState, Tensors
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.lineage.versions import share_weights
from headrace_trainer.metrics import SAVE_SECONDS
from headrace_trainer.settings import TrainerSettings

_POINTS_BYTES_MIN = 1 << 30
"""The bound on restore points without a setting, unless a single one is larger."""
log = get_logger(__name__)
_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of a full disk."""


@dataclass(frozen=True)
class LineageSnapshot:
    """Immutable copy of the state of a lineage between two steps, without its tensors."""

    time: datetime
    steps: int
    history: History
    state_fields: Mapping[str, object]
    """The result of `LineageState.snapshot`."""
    reported: SaveReport
    measured: Sequence[Mapping[str, float]]
    health: Health
    promoted: tuple[str, ...]


@dataclass(frozen=True)
class LineageResources:
    """Stores of a lineage, and the settings and the first version that its saves need."""

    settings: TrainerSettings
    blobs: BlobStore
    store: LineageStore
    first: Manifest


@dataclass
class Save:
    """One save of a lineage. If `write` raises an error, it may be called again."""

    resources: LineageResources
    previous: SavedState
    snapshot: LineageSnapshot
    copy: Copy | None
    """None where weights and optimizer are those of `before`, and no version is made."""
    result: tuple[SavedState, History, bool] | None = field(default=None, init=False)
    """The durable state, its history, and whether it has a new version, or None until the save is durable."""

    @property
    def publishes(self) -> bool:
        """Whether a version was requested. It is not published if its weights equal its parent's."""
        return self.copy is not None and self.copy.fingerprint is not None

    def provisional_history(self) -> History:
        """Return the version history to use until this save has ended.

        If the save publishes a version, it has a provisional name, because its digest is not known yet.
        """
        if not self.publishes:
            return self.snapshot.history
        digest = hashlib.sha256(f"step {self.snapshot.steps}, being saved".encode()).hexdigest()
        name = f"{self.resources.settings.model}@{digest[:16]}"
        return self._history_with(name, BlobRef(uri="none", sha256=digest, size=0))

    def write(self) -> None:
        """Store the snapshot, and make it the lineage's durable state atomically. Blocks.

        Raises:
            LearnerLost: the learner has failed.
            Exception: an error of `LineageStore.save`.
        """
        store = self.resources.store
        with SAVE_SECONDS.time():
            with store.scratch() as folder:
                present, published = self.previous.present, None
                if self.copy is not None:
                    present, published = self._store_tensors(self.copy, folder)
            history = self._history_with(published[0].version, published[1]) if published else self.snapshot.history
            saved = self._build_saved(history, present, published)
            store.save(saved)
            if self.copy is not None:
                self.copy.drop()
        self.result = saved, history, published is not None

    def _store_tensors(self, copy: Copy, folder: Path) -> tuple[Tensors, tuple[Manifest, BlobRef] | None]:
        """Write weights and optimizer of `copy` into `folder`, and store them, with the new version if there is one.

        The weights are stored before the optimizer is written, so that less space on the disk is needed.

        Returns:
            The stored weights and optimizer, and the new version's manifest with its blob, or None.
        """
        stored: list[tuple[tuple[BlobRef, Assembly | None], tuple[Manifest, BlobRef] | None]] = []
        copy.write(folder, lambda: stored.append(self._store_weights(folder)))
        (((weights, assembly), published),) = stored
        present = Tensors(weights=weights, optimizer=self.resources.store.store_optimizer(folder), assembly=assembly)
        return present, published

    def _store_weights(self, folder: Path) -> tuple[tuple[BlobRef, Assembly | None], tuple[Manifest, BlobRef] | None]:
        """Store the weights in `folder`, and its version if there is a new one."""
        store, head = self.resources.store, self.previous.restore_points.get(self.snapshot.history.head)
        if head is not None and head.weights.sha256 == digest_of(folder / WEIGHTS)[0]:
            # The weights equal the version's, whatever files the version has.
            (folder / WEIGHTS).unlink()
            return (head.weights, head.assembly), None
        if head is None and not self.publishes:  # the version's files may hold these weights
            manifest = self._manifest_of_head()
            versions.fetch_weights(self.resources.blobs, manifest, folder / VERSION)
            return store.store_weights(folder, share_weights(folder), manifest.files), None
        shared = share_weights(folder)  # before the version's files are moved away
        published, version_files = self._publish_version(folder)
        return store.store_weights(folder, shared, version_files), published

    def _publish_version(self, folder: Path) -> tuple[tuple[Manifest, BlobRef] | None, tuple[File, ...]]:
        """Publish a new version, unless its weights equal its parent's.

        Returns:
            The version's manifest with its blob, None without a new version; and the stored files that hold the
            weights.
        """
        if self.copy is None or self.copy.fingerprint is None:
            return None, ()
        resources, history = self.resources, self.snapshot.history
        manifest, ref = versions.publish_version(
            resources.blobs,
            folder / VERSION,
            self.copy.fingerprint,
            first=resources.first,
            lineage=resources.settings.lineage,
            step=history.next_number,
            parent=history.head,
            kind=self.previous.kind,
        )
        parent = self._manifest_of_head()
        same = versions.weight_digests(manifest) == versions.weight_digests(parent)
        return None if same else (manifest, ref), manifest.files

    def _manifest_of_head(self) -> Manifest:
        history = self.snapshot.history
        return files.read_manifest(self.resources.blobs, history[history.head].manifest)

    def _history_with(self, version: str, manifest: BlobRef) -> History:
        history = self.snapshot.history
        published = PublishedVersion(
            version=version,
            parent=history.head,
            number=history.next_number,
            manifest=manifest,
            first_step=history.head_step + 1,
            last_step=self.snapshot.steps,
        )
        return history.with_version(published, {self.resources.first.version, *self.snapshot.promoted}, VERSIONS_MAX)

    def _build_saved(
        self, history: History, present: Tensors, published: tuple[Manifest, BlobRef] | None
    ) -> SavedState:
        settings, snapshot, previous = self.resources.settings, self.snapshot, self.previous
        measured = summary.summarize_steps(snapshot.measured, snapshot.reported.outcomes)
        checkpoint, version = previous.checkpoint, published[0].version if published else None
        if published is not None:
            manifest, ref = published
            checkpoint = Checkpoint(
                time=snapshot.time,
                model=settings.model,
                version=manifest.version,
                lineage=settings.lineage,
                step=manifest.step,
                parent=manifest.parent,
                manifest=ref,
                metrics=measured,
            )
        metrics = TrainingMetrics(
            time=snapshot.time,
            model=settings.model,
            lineage=settings.lineage,
            step=history[history.head].number,
            account=previous.account + 1,
            version=version,
            metrics=measured,
            verdicts=snapshot.reported.outcomes,
            stopped=snapshot.health.stopped.reason if snapshot.health.stopped else None,
            undone=snapshot.reported.undone,
            restored=snapshot.reported.restored,
            batches=snapshot.reported.batches,
            read=snapshot.reported.read,
        )
        update = {
            **snapshot.state_fields,
            "versions": history.versions,
            "head": history.head,
            "head_step": history.head_step,
            "health": snapshot.health,
            "present": present,
            "restore_points": self._restore_points(history, present, version),
            "account": previous.account + 1,
            "checkpoint": checkpoint,
            "metrics": metrics,
        }
        return previous.model_copy(update=update)

    def _restore_points(self, history: History, present: Tensors, version: str | None) -> dict[str, Tensors]:
        """Return the restore points to keep by version. A restore point has the weights and optimizer of one version.

        Those of base and head are always kept, and as many others as fit into the limits. The oldest are removed first,
        those of the two last champions last. A version without a restore point is loaded from its files.
        """
        points = dict(self.previous.restore_points)
        if version is not None:
            points[version] = present
        needed, champions = {self.resources.first.version, history.head}, self.snapshot.promoted
        spares = [name for name in points if name not in {*needed, *champions}]
        memory = self.resources.settings.memory
        bytes_max = memory.restore_points_bytes or default_points_bytes(sum_bytes([present]))
        for spare in [*spares, *(name for name in reversed(champions) if name in points.keys() - needed)]:
            is_counted = spare in champions or len(points) <= memory.restore_points
            if is_counted and sum_bytes([present, *points.values()]) <= bytes_max:
                break
            del points[spare]
        return points


def default_points_bytes(point: int) -> int:
    """Return the default limit in bytes for all restore points, if a single one has `point` bytes."""
    return max(_POINTS_BYTES_MIN, point)


def sum_bytes(points: Iterable[Tensors]) -> int:
    """Return the bytes that these restore points take in the blob store in addition to published versions.

    A blob that several of them share counts once.
    """
    return sum({ref.sha256: ref.size for point in points for ref in point.blobs}.values())


class DiskRoom:
    """Guard that delays a save until the disk of the blob store has space for it.

    It never delays a save to a blob store that is not a local folder.
    """

    def __init__(self, blobs: BlobStore, clock: Clock, free_bytes_min: int | None) -> None:
        self._blobs = blobs
        self._clock = clock
        self._free_bytes_min = free_bytes_min
        self.trouble: str | None = None
        """The reason why `wait` waits, or None while it does not."""

    async def wait(self, next_bytes: int) -> None:
        """Pause training until the disk has space for `next_bytes` bytes besides the required minimum."""
        while (
            reason := await asyncio.to_thread(self._blobs.space_problem, next_bytes, self._free_bytes_min)
        ) is not None:
            if self.trouble is None:
                log.error("training_pauses", error=reason)
            self.trouble = f"training is paused: {reason}"
            await self._clock.sleep(_CHECK_INTERVAL_S)
        if self.trouble is not None:
            log.info("training_goes_on")
        self.trouble = None
