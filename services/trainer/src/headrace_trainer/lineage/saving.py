"""One save: what is to become durable, from the moment that it speaks of until it is.

`Lineage.begin_save` takes the moment in hand, and steps may go on; `Save.write` makes it durable, beside them or not;
`Lineage.end_save` takes note. There is one at a time. A crash before the end of `write` leaves the save before it: the
pointer is replaced last, by the lineage's owner alone (`headrace_trainer.lineage.store`).

The version that a save makes has its name from its files, so steps in between know it by a name that nobody else does.
It counts for their staleness as if it were durable: when that will be has no part in what is trained (P9).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from headrace_runtime import versions as files
from headrace_runtime.blobs import BlobStore, digest_of
from headrace_schemas import Checkpoint, TrainingMetrics
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import File, Manifest
from headrace_trainer.batches import summary
from headrace_trainer.experiences.history import History, Published
from headrace_trainer.experiences.state import Reported
from headrace_trainer.learner import VERSION, WEIGHTS, Copy
from headrace_trainer.lineage import versions
from headrace_trainer.lineage.assembly import share_weights
from headrace_trainer.lineage.health import Health
from headrace_trainer.lineage.saved import Saved, Tensors
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.metrics import SAVE_SECONDS
from headrace_trainer.settings import TrainerSettings

_POINTS_BYTES_MIN, _POINTS_OF_SIZE = 1 << 30, 4
"""The bound on restore points where no setting has another: 1 GiB, or four of their size."""


@dataclass(frozen=True)
class Moment:
    """A lineage between two steps. Nothing in it changes any more."""

    time: datetime
    steps: int
    history: History
    snapshot: Mapping[str, object]
    """`LineageState.snapshot`."""
    reported: Reported
    measured: Sequence[Mapping[str, float]]
    health: Health
    promoted: tuple[str, ...]


@dataclass(frozen=True)
class LineagePlace:
    """Where the lineage is kept, and what its versions have in common."""

    settings: TrainerSettings
    blobs: BlobStore
    store: LineageStore
    first: Manifest


@dataclass
class Save:
    """`write` may be called again when it has raised."""

    place: LineagePlace
    before: Saved
    moment: Moment
    copy: Copy | None
    """None where weights and optimizer are those of `before`, and no version is made."""
    made: tuple[Saved, History, bool] | None = field(default=None, init=False)
    """What is durable, the versions that there are then, and whether one of them is new; None until it is."""

    @property
    def publishes(self) -> bool:
        """Whether a version is made, unless it would answer as its parent does."""
        return self.copy is not None and self.copy.fingerprint is not None

    def history_meanwhile(self) -> History:
        """What steps in between go by."""
        if not self.publishes:
            return self.moment.history
        digest = hashlib.sha256(f"step {self.moment.steps}, being saved".encode()).hexdigest()
        name = f"{self.place.settings.model}@{digest[:16]}"
        return self._history_with(name, BlobRef(uri="none", sha256=digest, size=0))

    def write(self) -> None:
        """Make everything durable at once. Blocks. Raises what `LineageStore.save` does, and `LearnerLost`."""
        store = self.place.store
        with SAVE_SECONDS.time():
            with store.scratch() as folder:
                present, found = self.before.present, None
                if self.copy is not None:
                    self.copy.write(folder)
                    present, found = self._stored(folder)
            history = self._history_with(found[0].version, found[1]) if found else self.moment.history
            saved = self._picture(history, present, found)
            store.save(saved)
            if self.copy is not None:
                self.copy.drop()
        self.made = saved, history, found is not None

    def _stored(self, folder: Path) -> tuple[Tensors, tuple[Manifest, BlobRef] | None]:
        """Store what the copy has written: weights and optimizer, and the new version if there is one."""
        store, head = self.place.store, self.before.restore_points.get(self.moment.history.head)
        if head is not None and head.weights.sha256 == digest_of(folder / WEIGHTS)[0]:
            return store.packed(folder, like=head), None  # the version's own weights, whatever files it has
        shared = share_weights(folder)  # before the version's files are moved away
        found, files = self._published(folder)
        return store.packed(folder, shared, files), found

    def _published(self, folder: Path) -> tuple[tuple[Manifest, BlobRef] | None, tuple[File, ...]]:
        """A new version, unless it would answer as its parent does; and the files that hold its weights, or its
        parent's, in the store."""
        if self.copy is None or self.copy.fingerprint is None:
            return None, ()
        place, history = self.place, self.moment.history
        manifest, ref = versions.publish(
            place.blobs,
            folder / VERSION,
            self.copy.fingerprint,
            first=place.first,
            lineage=place.settings.lineage,
            step=history.next_number,
            parent=history.head,
            kind=self.before.kind,
        )
        parent = files.read_manifest(place.blobs, history[history.head].manifest)
        same = versions.weight_digests(manifest) == versions.weight_digests(parent)
        return None if same else (manifest, ref), manifest.files

    def _history_with(self, version: str, manifest: BlobRef) -> History:
        old, settings = self.moment.history, self.place.settings
        published = Published(
            version=version,
            parent=old.head,
            number=old.next_number,
            manifest=manifest,
            first_step=old.head_step + 1,
            last_step=self.moment.steps,
        )
        return old.published(published, {self.place.first.version, *self.moment.promoted}, settings.memory.versions)

    def _picture(self, history: History, present: Tensors, found: tuple[Manifest, BlobRef] | None) -> Saved:
        settings, moment, before = self.place.settings, self.moment, self.before
        measured = summary.between_saves(moment.measured, moment.reported.outcomes)
        checkpoint, version = before.checkpoint, found[0].version if found else None
        if found is not None:
            manifest, ref = found
            checkpoint = Checkpoint(
                time=moment.time,
                model=settings.model,
                version=manifest.version,
                lineage=settings.lineage,
                step=manifest.step,
                parent=manifest.parent,
                manifest=ref,
                metrics=measured,
            )
        metrics = TrainingMetrics(
            time=moment.time,
            model=settings.model,
            lineage=settings.lineage,
            step=history[history.head].number,
            account=before.account + 1,
            version=version,
            metrics=measured,
            verdicts=moment.reported.outcomes,
            stopped=moment.health.stopped.reason if moment.health.stopped else None,
            undone=moment.reported.undone,
            restored=moment.reported.restored,
            batches=moment.reported.batches,
            read=moment.reported.read,
        )
        update = {
            **moment.snapshot,
            "versions": history.versions,
            "head": history.head,
            "head_step": history.head_step,
            "health": moment.health,
            "present": present,
            "restore_points": self._restore_points(history, present, version),
            "account": before.account + 1,
            "checkpoint": checkpoint,
            "metrics": metrics,
        }
        return before.model_copy(update=update)

    def _restore_points(self, history: History, present: Tensors, version: str | None) -> dict[str, Tensors]:
        """Those of base, head, champion and previous, and the newest of the rest."""
        points = dict(self.before.restore_points)
        if version is not None:
            points[version] = present
        keep = {self.place.first.version, history.head, *self.moment.promoted}
        memory = self.place.settings.memory
        bytes_max = memory.restore_points_bytes or default_points_bytes(sum_bytes([present]))
        for spare in [name for name in points if name not in keep]:  # the oldest first
            if len(points) <= memory.restore_points and sum_bytes([present, *points.values()]) <= bytes_max:
                break
            del points[spare]
        return points


def default_points_bytes(point: int) -> int:
    """Return the bound where no setting has another, for restore points of `point` bytes."""
    return max(_POINTS_BYTES_MIN, _POINTS_OF_SIZE * point)


def sum_bytes(points: Iterable[Tensors]) -> int:
    """Return the bytes that `points` take besides versions. What several refer to counts once."""
    return sum({ref.sha256: ref.size for point in points for ref in point.blobs}.values())
