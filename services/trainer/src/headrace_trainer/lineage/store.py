"""Saves the state of a lineage atomically, loads it, and records its owner. All methods block.

A save stores the blobs first, each durable, and then replaces the pointer by compare-and-swap. A crash before that
leaves the old state, a crash after it the new one. A state is never repaired by guessing: a damaged or missing blob
ends the process with the name of the blob.

A lineage has one owner at a time. A takeover replaces the pointer, with the same state and the next epoch: after that
no save of the former owner can succeed, however late it comes. Each owner writes its blobs in an area of its own, so a
former owner that still writes or removes blobs cannot touch those of its successors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from headrace_runtime.errors import CorruptBlob, HeadraceError, SettingError, Unavailable
from headrace_runtime.process import liveness
from headrace_runtime.storage import disk
from headrace_runtime.storage.blobs import BlobStore, digest_of
from headrace_runtime.storage.records import Record, Records
from headrace_schemas.values.blobs import BlobRef, File
from headrace_trainer.learner import OPTIMIZER, WEIGHTS
from headrace_trainer.lineage.saved import Assembly, LegacyPointer, Pointer, SavedState, Tensors, read_saved
from headrace_trainer.lineage.versions import SharedWeights, assemble
from headrace_trainer.settings import TrainerSettings

_M = TypeVar("_M", Pointer, LegacyPointer, SavedState)
_BEAT = "beat"
_RELEASED = b"released"
_READS_MAX = 20
_SHARED = 0
"""The epoch of shared blobs, which an earlier release wrote outside any area."""


class LineageTaken(HeadraceError):
    """Error: another process owns the lineage."""


@dataclass(frozen=True, slots=True)
class OwnerSign:
    """Owner and last heartbeat of a lineage. If two reads are equal, there was no heartbeat in between."""

    number: int
    """Number of the pointer record; 0 when the lineage has never had an owner."""
    owner: str
    beat: bytes | None

    @property
    def is_free(self) -> bool:
        """Whether the lineage has no owner: it never had one, or it was released."""
        return not self.owner or self.beat == _RELEASED


class LineageStore:
    """Store of the saved state of one lineage.

    `take_over` makes this process the owner; `load`, `save`, `beat` and `release` are for the owner.
    """

    def __init__(self, blobs: BlobStore, lineage: str, owner: str | None = None) -> None:
        self.owner = owner or liveness.new_holder()
        self._blobs = blobs
        self._lineage = lineage
        self._records = Records(blobs, f"lineages/{lineage}")
        self._number = 0
        self._pointer: Pointer | None = None
        """The pointer as this process read or wrote it last."""
        self._written: set[str] = set()
        """Digests of the blobs that this process has written into its area."""
        self._beats = 0

    # Ownership

    def read_owner_sign(self) -> OwnerSign:
        """Return the present owner with its last heartbeat."""
        newest = self._newest_pointer()
        if newest is None:
            return OwnerSign(0, "", None)
        number, pointer = newest
        beat = self._area(pointer.epoch).pointer(_BEAT) if pointer.epoch else None
        return OwnerSign(number, pointer.owner, beat)

    def take_over(self) -> bool:
        """Make this process the owner, whichever process owned the lineage.

        Returns:
            False if the pointer was changed by another process meanwhile. Call `read_owner_sign` before another try.
        """
        newest = self._newest_pointer()
        number, old = newest or (0, None)
        epoch = old.epoch + 1 if old else 1
        state, epochs = (old.state, old.epochs) if old else (None, {})
        pointer = Pointer(epoch=epoch, owner=self.owner, state=state, epochs=epochs)
        if not self._records.append(number, pointer.model_dump_json().encode()):
            return False
        self._number, self._pointer, self._written = number + 1, pointer, set()
        return True

    def beat(self) -> None:
        """Write a heartbeat. Raises `LineageTaken` if another process owns the lineage."""
        self._beats += 1
        self._area(self._epoch).set_pointer(_BEAT, str(self._beats).encode())
        self._check_ownership()

    def release(self) -> None:
        """Release the lineage, so that the next process can begin at once. Do not save afterwards."""
        self._area(self._epoch).set_pointer(_BEAT, _RELEASED)

    # State

    def load(self) -> SavedState | None:
        """Return the last saved state, or None if the lineage was never saved. Unfinished saves of former owners are
        removed.

        Raises:
            CorruptBlob: The state is damaged.
            Unavailable: The state cannot be read.
        """
        assert self._pointer is not None, "a lineage is taken before it is loaded"
        saved = self._load_state(self._pointer)
        self._sweep(self._pointer)
        return saved

    def read(self) -> SavedState | None:
        """Return the last durable state without changing anything, also while the lineage is in training."""
        number = 0
        for _ in range(_READS_MAX):
            newest = self._newest_pointer()
            if newest is None:
                return None
            try:
                self._number, self._pointer = newest
                return self._load_state(newest[1])
            except (CorruptBlob, Unavailable):
                if newest[0] == number:
                    raise
                number = newest[0]  # the state may have been replaced while it was read
        raise Unavailable(self._add_remedy("is saved faster than it can be read"))

    def get(self, ref: BlobRef) -> bytes:
        """Return the content of a blob of the state. Raises `CorruptBlob` if it is damaged, `Unavailable` if
        missing."""
        with self._adding_remedy():
            return self._area_of(ref).get(ref)

    def _area_of(self, ref: BlobRef) -> BlobStore:
        assert self._pointer is not None, "a lineage is read before its blobs"
        return self._area(self._pointer.epochs.get(ref.sha256, _SHARED))

    @contextlib.contextmanager
    def _adding_remedy(self) -> Iterator[None]:
        try:
            yield
        except (CorruptBlob, Unavailable) as error:
            if self._pointer is not None and self._pointer.owner == self.owner:
                self._check_ownership()  # a new owner may have removed the blob
            raise type(error)(self._add_remedy(str(error))) from error

    @contextlib.contextmanager
    def open_tensors(self, point: Tensors) -> Iterator[Path]:
        """Open a context with a folder that contains the files of `point`, as `Copy.write` wrote them.

        Raises the errors of `get`.
        """
        with self.scratch() as folder:
            with self._adding_remedy():
                self._area_of(point.optimizer).get_file(point.optimizer, folder / OPTIMIZER)
                if point.assembly is None:
                    self._area_of(point.weights).get_file(point.weights, folder / WEIGHTS)
                else:
                    self._assemble(point.weights, point.assembly, folder / WEIGHTS)
            yield folder

    def _assemble(self, weights: BlobRef, assembly: Assembly, target: Path) -> None:
        with self.scratch() as folder:
            sources = [folder / str(number) for number in range(1 + len(assembly.files))]
            for ref, path in zip((assembly.frame, *assembly.files), sources, strict=True):
                self._area_of(ref).get_file(ref, path)
            assemble(sources, assembly.ranges, target)
        if digest_of(target) != (weights.sha256, weights.size):
            raise CorruptBlob(f"blob {assembly.frame.uri}: the weights that it frames do not hash to {weights.sha256}")

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Open a context with a temporary folder for the files of a save. Disk errors within it become
        `Unavailable`."""
        area = self._area(self._epoch)
        try:
            with area.scratch() as folder:
                yield folder
        except (OSError, Unavailable) as error:
            self._check_ownership()  # a new owner may have removed the folder
            if isinstance(error, Unavailable):
                raise
            raise disk.full_error(area.url) if disk.is_full(error) else Unavailable(f"{area.url}: {error}") from error

    def store_weights(
        self, folder: Path, shared: SharedWeights | None = None, files: Sequence[File] = ()
    ) -> tuple[BlobRef, Assembly | None]:
        """Store the weights that `Copy.write` wrote into `folder` for the next save, and remove them from the folder.

        Args:
            folder: A folder of `scratch`.
            shared: How to assemble the weights from `files` and the frame; None to store the whole file.
            files: The files of a version that are stored already.

        Returns:
            The fields `weights` and `assembly` of `Tensors`.

        Raises:
            Exception: An error of `save`.
        """
        if shared is None:
            return self._put_file(folder / WEIGHTS), None
        sha256, size = digest_of(folder / WEIGHTS)
        frame = self._put_file(shared.frame)
        (folder / WEIGHTS).unlink()
        return BlobRef(uri=frame.uri, sha256=sha256, size=size), shared.assembly(files, frame)

    def store_optimizer(self, folder: Path) -> BlobRef:
        """Store the state of the optimizer for the next save, and return its blob.

        Args:
            folder: the folder into which `Copy.write` has written the file `OPTIMIZER`. The file is moved out of it.
        """
        return self._put_file(folder / OPTIMIZER)

    def _put_file(self, path: Path) -> BlobRef:
        return self._put(partial(BlobStore.put_file, path=path, move=True), self._area(self._epoch))

    def save(self, saved: SavedState) -> None:
        """Make `saved` the current state. Its blobs must be stored already.

        Raises:
            LineageTaken: another process owns the lineage.
            Unavailable: the store is unavailable. The state may have been saved; it is safe to save it again.
        """
        old = self._pointer
        assert old is not None, "a lineage is taken before it is saved"
        area = self._area(old.epoch)
        ref = self._put(partial(BlobStore.put, data=saved.model_dump_json().encode()), area)
        used = {digest: old.epoch if digest in self._written else old.epochs[digest] for digest in saved.blobs()}
        pointer = Pointer(epoch=old.epoch, owner=self.owner, state=ref, epochs=used | {ref.sha256: old.epoch})
        self._swap(pointer)
        superfluous = {*old.epochs.items(), *((digest, old.epoch) for digest in self._written)}
        for digest, epoch in sorted(superfluous - set(pointer.epochs.items())):
            self._area(epoch).delete(_deletable_ref(digest))
        self._written &= {digest for digest, epoch in pointer.epochs.items() if epoch == pointer.epoch}

    def _put(self, how: Callable[[BlobStore], BlobRef], area: BlobStore) -> BlobRef:
        try:
            ref = how(area)
            self._written.add(ref.sha256)
            return ref
        except Unavailable:
            self._check_ownership()  # a new owner may be removing the area
            raise

    def _swap(self, pointer: Pointer) -> None:
        data = pointer.model_dump_json().encode()
        while not self._records.append(self._number, data):
            self._number = self._check_ownership()  # still the owner: an earlier try succeeded, but its answer was lost
        self._number, self._pointer = self._number + 1, pointer

    def _check_ownership(self) -> int:
        """Return the number of the newest pointer record. Raise `LineageTaken` when it names another owner."""
        newest = self._newest_pointer()
        if newest is None or newest[1].owner != self.owner:
            raise LineageTaken(self._takeover_message(newest[1].owner if newest else ""))
        return newest[0]

    def _load_state(self, pointer: Pointer) -> SavedState | None:
        if pointer.state is None:
            return None
        saved = self._parse(read_saved, self.get(pointer.state))
        # Blobs of an earlier release are in no table of epochs.
        epochs = dict.fromkeys((*saved.blobs(), pointer.state.sha256), _SHARED) | pointer.epochs
        self._pointer = pointer.model_copy(update={"epochs": epochs})
        return saved

    def _newest_pointer(self) -> tuple[int, Pointer] | None:
        record = self._records.newest() or self._legacy_pointer()
        return None if record is None else (record.number, self._parse(Pointer.model_validate_json, record.data))

    def _legacy_pointer(self) -> Record | None:
        """Read the pointer of an earlier release: a file that stays as it is. The records of an owner take
        precedence."""
        data = self._blobs.pointer(f"lineages/{self._lineage}")
        if data is None:
            return None
        pointer = Pointer(
            epoch=0, owner="", state=self._parse(LegacyPointer.model_validate_json, data).state, epochs={}
        )
        return Record(0, pointer.model_dump_json().encode())

    def _parse(self, read: Callable[[bytes], _M], data: bytes) -> _M:
        try:
            return read(data)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise CorruptBlob(self._add_remedy(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")) from None

    def _sweep(self, pointer: Pointer) -> None:
        """Delete the files in former owners' areas that no saved state needs. They cannot save any more."""
        needed = set(pointer.epochs.items())
        for name in self._blobs.areas(self._areas):
            epoch = int(name)
            if epoch >= pointer.epoch:
                continue
            if epoch not in pointer.epochs.values():
                self._blobs.remove_area(f"{self._areas}/{name}")
                continue
            area = self._area(epoch)
            area.remove_scratch()
            for digest in list(area.digests()):
                if (digest, epoch) not in needed:
                    area.delete(_deletable_ref(digest))

    @property
    def _areas(self) -> str:
        return f"lineages/{self._lineage}"

    @property
    def _epoch(self) -> int:
        assert self._pointer is not None, "a lineage is taken first"
        return self._pointer.epoch

    def _area(self, epoch: int) -> BlobStore:
        return self._blobs if epoch == _SHARED else self._blobs.area(f"{self._areas}/{epoch:010d}")

    def _takeover_message(self, owner: str) -> str:
        holder = liveness.describe(owner) if owner else "an unknown process, which removed its pointer"
        return (
            f"lineage {self._lineage} belongs to {holder} now, and this process can save nothing any more; its earlier "
            "saves are kept and are continued there. If two trainers were started, stop one of them or name another "
            "trainer.lineage for it"
        )

    def _add_remedy(self, problem: str) -> str:
        remedy = "restore the blob store from a backup, or name another trainer.lineage"
        return f"lineages/{self._lineage}: {problem}; {remedy}"


def _deletable_ref(digest: str) -> BlobRef:
    """Return a reference that is sufficient to delete a blob by its digest."""
    return BlobRef(uri="none", sha256=digest, size=0)


def replayed_versions(settings: TrainerSettings, blobs: BlobStore) -> dict[str, int]:
    """Return the number of each version of the lineage that `trainer.replays` names; empty if nothing is replayed.

    Raises:
        SettingError: there is no such lineage.
    """
    if settings.replays is None:
        return {}
    other = LineageStore(blobs, settings.replays).read()
    if other is None:
        raise SettingError("trainer.replays", settings.replays, "no such lineage in this blob store")
    return {published.version: published.number for published in other.versions}
